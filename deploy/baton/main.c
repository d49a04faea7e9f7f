/* baton: the tools of an operator, one subcommand each. */
#include "deploy/baton/baton.h"

#include "base/conf.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} COMMANDS[] = {
    {"doctor", baton_doctor, "say what will limit a service on this host, and what to change"},
    {"pack", baton_pack, "make expert files for expertd from a checkpoint, or verify them"},
};

enum { N_COMMANDS = sizeof COMMANDS / sizeof *COMMANDS };

static void usage(FILE *to) {
    fprintf(to, "usage: baton COMMAND [options]\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", COMMANDS[i].name, COMMANDS[i].help);
    fprintf(to, "\n`baton COMMAND --help` explains a command.\n");
}

int main(int argc, char **argv) {
    const char *names[N_COMMANDS + 1] = {NULL};
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        usage(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("baton %s\n", BATON_VERSION);
        return 0;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        names[i] = COMMANDS[i].name;
        if (strcmp(argv[1], COMMANDS[i].name) == 0)
            return COMMANDS[i].run(argc - 1, argv + 1);
    }
    const char *near = conf_nearest(argv[1], names);
    fprintf(stderr, "baton: no command \"%s\"%s%s%s\n", argv[1], near ? "; did you mean " : "",
            near ? near : "", near ? "?" : "");
    return 2;
}
