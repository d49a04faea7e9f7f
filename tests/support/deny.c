/* deny CALL[,CALL...] COMMAND...: runs a command whose system calls of these names fail with EPERM,
 * as in a container that does not allow them. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 16 };

static const struct {
    const char *name;
    unsigned number;
} CALLS[] = {
    {"mbind", SYS_mbind},
    {"set_mempolicy", SYS_set_mempolicy},
    {"move_pages", SYS_move_pages},
    {"sched_setaffinity", SYS_sched_setaffinity},
    {"memfd_create", SYS_memfd_create},
    {"mlock", SYS_mlock},
};

/* The number of a call; -1 when the name is not known. */
static long number(const char *name) {
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
        if (strcmp(CALLS[i].name, name) == 0)
            return (long)CALLS[i].number;
    return -1;
}

static int deny(char *names) {
    struct sock_filter f[MOST * 2 + 2];
    unsigned short n = 0;
    f[n++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (char *save, *name = strtok_r(names, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        long call = number(name);
        if (call < 0 || n >= MOST * 2) {
            fprintf(stderr, "deny: cannot deny %s\n", name);
            return -1;
        }
        f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1);
        f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog p = {n, f};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) {
        perror("deny");
        return -1;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s CALL[,CALL...] COMMAND...\n", argv[0]);
        return 2;
    }
    if (deny(argv[1]))
        return 2;
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 2;
}
