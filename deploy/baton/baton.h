/* The subcommands of `baton`. Each gets the arguments from its own name on and returns the exit
 * status: 0 done, 1 failed, 2 wrong use. */
#pragma once

/* Its exit status: doctor.c. */
int baton_doctor(int argc, char **argv);
int baton_pack(int argc, char **argv);
