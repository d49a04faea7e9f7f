/* Both ends of shared memory at one address, for tests that run both in one process: a sanitizer of
 * threads knows memory by its address and would not see two views of it meet. Linked with
 * -Wl,--wrap=mmap,--wrap=munmap it gives a file that is mapped a second time the first view. Any
 * thread. */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { MOST = 256 };

typedef struct View {
    void *at; /* NULL: a free place */
    size_t bytes;
    dev_t dev;
    ino_t ino;
    int n; /* how often it is mapped */
} View;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards view */
static View view[MOST];

void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
int __wrap_munmap(void *at, size_t bytes);

static void *map_shared(size_t bytes, int prot, int flags, int fd, const struct stat *st) {
    View *empty = NULL;
    for (int i = 0; i < MOST; i++) {
        View *v = &view[i];
        if (v->at && v->dev == st->st_dev && v->ino == st->st_ino && v->bytes == bytes) {
            v->n++;
            return v->at;
        }
        if (!v->at)
            empty = v;
    }
    void *p = __real_mmap(NULL, bytes, prot, flags, fd, 0);
    if (p != MAP_FAILED && empty)
        *empty = (View){p, bytes, st->st_dev, st->st_ino, 1};
    return p;
}

void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset) {
    struct stat st;
    if (at || offset || fd < 0 || !(flags & MAP_SHARED) || fstat(fd, &st))
        return __real_mmap(at, bytes, prot, flags, fd, offset);
    pthread_mutex_lock(&lock);
    void *p = map_shared(bytes, prot, flags, fd, &st);
    pthread_mutex_unlock(&lock);
    return p;
}

int __wrap_munmap(void *at, size_t bytes) {
    bool last = true;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (view[i].at == at && view[i].bytes == bytes) {
            last = --view[i].n == 0;
            if (last)
                view[i].at = NULL;
            break;
        }
    pthread_mutex_unlock(&lock);
    return last ? __real_munmap(at, bytes) : 0;
}
