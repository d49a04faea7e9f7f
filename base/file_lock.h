/* A path that one process at a time may write: a lock on PATH.lock beside it, which ends with its
 * holder. Any thread. */
#pragma once

#include "base/err.h"

typedef struct FileLock FileLock;

/* Never waits. E_BUSY names the process that has it; E_IO when PATH.lock cannot be made. The
 * file PATH.lock stays. */
int file_lock_take(FileLock **out, const char *path, Err *err);
/* NULL is a no-op. */
void file_lock_free(FileLock *l);
