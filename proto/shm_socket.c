/* Memory, descriptors and futexes that two processes share. No state; any thread. */
#include "proto/shm_int.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

unsigned shm_address(struct sockaddr_un *at, const char *name) {
    size_t n = strlen(name);
    CHECK(n <= SHM_NAME_MAX);
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(at->sun_path + 1, name, n); /* a name that begins with 0 is in no file system */
    return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

typedef union Control {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
} Control;

int shm_send(int sock, const void *m, size_t n, int fd) {
    Control c = {0};
    struct iovec iov = {(void *)m, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        msg.msg_control = &c;
        msg.msg_controllen = sizeof c;
        c.head = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
        memcpy(CMSG_DATA(&c.head), &fd, sizeof fd);
    }
    return sendmsg(sock, &msg, MSG_NOSIGNAL) == (ssize_t)n ? 0 : -1;
}

int shm_receive(int sock, void *m, size_t n, int *fd) {
    Control c = {0};
    struct iovec iov = {m, n};
    struct msghdr msg = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
    *fd = -1;
    ssize_t got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    struct cmsghdr *head = got >= 0 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
        head->cmsg_len == CMSG_LEN(sizeof *fd))
        memcpy(fd, CMSG_DATA(head), sizeof *fd);
    if (got == (ssize_t)n && !(msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return 0;
    if (got >= 0)
        errno = got == 0 ? ECONNRESET : EPROTO;
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return -1;
}

int shm_memory(const char *name, size_t n, void **at) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -1;
    int rc = ftruncate(fd, (off_t)n) ? errno : posix_fallocate(fd, 0, (off_t)n);
    if (rc)
        errno = rc;
    else if (fcntl(fd, F_ADD_SEALS, SEALS) == 0) {
        *at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*at != MAP_FAILED)
            return fd;
    }
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

const char *shm_check(int sock, int memory, size_t n) {
    struct ucred who;
    socklen_t len = sizeof who;
    struct stat st;
    if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &who, &len) ||
        (who.uid != geteuid() && who.uid != 0))
        return "of another user";
    int seals = memory < 0 ? -1 : fcntl(memory, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return "memory that may change its size";
    if (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
        return "memory that cannot be written";
    if (fstat(memory, &st) || (uint64_t)st.st_size != n)
        return "memory of another size than its slots need";
    return NULL;
}

void shm_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void shm_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_us) {
    struct timespec t = {timeout_us / 1000000, timeout_us % 1000000 * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}
