/* An operating system that fails when it is told to, for LD_PRELOAD.

   fault_sync(at, times): of the calls of fsync and fdatasync on files whose
   path contains fault_path, the at-th from now fails with EIO, and times - 1
   after it; at 0 is never. fault_syncs(): such calls since then.
   fault_clock(seconds): how far the wall clock is off; monotonic clocks are
   not. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long calls, first, count;
static long long offset;
static char pattern[256];

void fault_path(const char *text) {
  strncpy(pattern, text, sizeof pattern - 1);
}

void fault_sync(long at, long times) {
  __atomic_store_n(&calls, 0, __ATOMIC_SEQ_CST);
  first = at;
  count = times;
}

long fault_syncs(void) { return __atomic_load_n(&calls, __ATOMIC_SEQ_CST); }

void fault_clock(long long seconds) { offset = seconds; }

static int fails(int file) {
  char name[64], path[4096];
  long n;
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  n = readlink(name, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  if (!pattern[0] || !strstr(path, pattern)) return 0;
  n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  return first && n >= first && n < first + count;
}

int fsync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  if (fails(file)) { errno = EIO; return -1; }
  return real(file);
}

int fdatasync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
  if (fails(file)) { errno = EIO; return -1; }
  return real(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (!status && clock == CLOCK_REALTIME) now->tv_sec += offset;
  return status;
}

int gettimeofday(struct timeval *now, void *zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int status = real(now, zone);
  if (!status) now->tv_sec += offset;
  return status;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
