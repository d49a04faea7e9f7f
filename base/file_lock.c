/* See file_lock.h: flock on a file that holds the number of its holder's process. */
#include "base/file_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

struct FileLock {
    int fd;
};

static int taken(const char *path, int fd, Err *err) {
    char who[32] = "";
    ssize_t n = read(fd, who, sizeof who - 1);
    who[n > 0 ? n : 0] = 0;
    return err_set(err, E_BUSY, "%s: process %ld writes it already", path, atol(who));
}

int file_lock_take(FileLock **out, const char *path, Err *err) {
    char *name = xasprintf("%s.lock", path), who[32];
    int rc = 0, fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        rc = err_set(err, E_IO, "%s: %s", name, strerror(errno));
    else if (flock(fd, LOCK_EX | LOCK_NB))
        rc = errno == EWOULDBLOCK ? taken(path, fd, err)
                                  : err_set(err, E_IO, "%s: %s", name, strerror(errno));
    free(name);
    if (rc == 0) {
        int n = snprintf(who, sizeof who, "%ld\n", (long)getpid());
        if (ftruncate(fd, 0) || write(fd, who, (size_t)n) != n)
            rc = err_set(err, E_IO, "%s.lock: %s", path, strerror(errno));
    }
    if (rc) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    *out = xcalloc(1, sizeof **out);
    (*out)->fd = fd;
    return 0;
}

void file_lock_free(FileLock *l) {
    if (!l)
        return;
    close(l->fd);
    free(l);
}
