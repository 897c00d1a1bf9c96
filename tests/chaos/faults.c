/* Faults of disks, clocks and networks, injected into a process by LD_PRELOAD.
 *
 * Operations on files below CHAOS_FOLDER are counted per rank, in the mapped file CHAOS_COUNTS. Operation number
 * CHAOS_AT of rank CHAOS_RANK (-1: of processes that are no ranks) fires CHAOS_ACTION once, and never again after a
 * restart. Without CHAOS_ACTION operations are only counted. `chaos_configure` reads the environment again, for a
 * forked process. The names of the shared memory that the process makes are appended to the file CHAOS_MEMORY.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, FILES = 1 << 16 };

struct shared {
  atomic_long counts[RANKS + 1]; /* [0]: of processes that are no ranks */
  atomic_int fired;
  atomic_long clock_jump; /* seconds */
};

static struct shared nowhere, *shared = &nowhere;
static char folder[PATH_MAX];
static char action[16];
static long at = -1, wanted_rank = -1, amount;
static atomic_int active; /* the fault is in this process */
static unsigned char below_folder[FILES];
static pthread_mutex_t configuring = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name)                                      \
  static __typeof__(name)* real;                        \
  if (!real) real = (__typeof__(name)*)dlsym(RTLD_NEXT, #name)

static long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

static const char* text(const char* name) {
  const char* found = getenv(name);
  return found ? found : "";
}

__attribute__((constructor)) void chaos_configure(void) {
  pthread_mutex_lock(&configuring);
  snprintf(folder, sizeof folder, "%s", text("CHAOS_FOLDER"));
  snprintf(action, sizeof action, "%s", text("CHAOS_ACTION"));
  at = number("CHAOS_AT", -1);
  wanted_rank = number("CHAOS_RANK", -1);
  amount = number("CHAOS_AMOUNT", 0);
  active = 0;
  shared = &nowhere;
  int file = folder[0] ? (int)syscall(SYS_openat, AT_FDCWD, text("CHAOS_COUNTS"), O_RDWR) : -1;
  if (file >= 0) {
    void* mapped = mmap(NULL, sizeof nowhere, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) shared = mapped;
    syscall(SYS_close, file);
  }
  pthread_mutex_unlock(&configuring);
}

/* Whether a path is below the folder. */
static int is_below(int directory, const char* path) {
  char name[2 * PATH_MAX];
  if (!folder[0] || !path) return 0;
  if (path[0] == '/') {
    snprintf(name, sizeof name, "%s", path);
  } else {
    char base[PATH_MAX], link[64];
    ssize_t length;
    if (directory == AT_FDCWD) {
      snprintf(link, sizeof link, "/proc/self/cwd");
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    }
    length = readlink(link, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = 0;
    snprintf(name, sizeof name, "%s/%s", base, path);
  }
  size_t length = strlen(folder);
  return !strncmp(name, folder, length) && (name[length] == '/' || !name[length]);
}

/* Note the name of shared memory that is made, with a prefix that the system adds. */
static void note_memory(const char* prefix, const char* name) {
  char line[PATH_MAX];
  int file = (int)syscall(SYS_openat, AT_FDCWD, text("CHAOS_MEMORY"), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0) return;
  int length = snprintf(line, sizeof line, "%s%s\n", prefix, name + (name[0] == '/'));
  if (length < (int)sizeof line) (void)!syscall(SYS_write, file, line, (size_t)length);
  syscall(SYS_close, file);
}

static void note_path(const char* path) {
  static const char memory[] = "/dev/shm/";
  if (!strncmp(path, memory, sizeof memory - 1)) note_memory("", path + sizeof memory - 1);
}

static int is_tracked(int file) { return file >= 0 && file < FILES && below_folder[file]; }

static void track(int file, int below) {
  if (file >= 0 && file < FILES) below_folder[file] = (unsigned char)below;
}

static int is(const char* name) { return !strcmp(action, name); }

/* Count an operation, and fire the fault if this is the one. */
static void count(void) {
  long rank = number("RANK", -1), slot = rank < RANKS ? rank + 1 : 0;
  long n = atomic_fetch_add(&shared->counts[slot], 1) + 1;
  if (!action[0] || rank != wanted_rank || n != at || atomic_exchange(&shared->fired, 1)) return;
  if (is("kill")) kill(getpid(), SIGKILL);
  if (is("stop")) kill(getpid(), SIGSTOP);
  if (is("term")) kill(getpid(), SIGTERM);
  if (is("clock")) shared->clock_jump = amount;
  active = 1;
}

enum { READS, WRITES, CREATES };

/* Count an operation. Returns the error with which it fails, or 0. */
static int fails(int what) {
  count();
  if (!active) return 0;
  if (is("slow")) {
    struct timespec wait = {amount / 1000, amount % 1000 * 1000000};
    nanosleep(&wait, NULL);
  }
  if (is("full") && what != READS) return ENOSPC;
  if (is("io") && what != CREATES) {
    if (amount && !--amount) active = 0; /* the last operation that fails */
    return EIO;
  }
  return 0;
}

#define FAIL(what)            \
  do {                        \
    int error = fails(what);  \
    if (error) {              \
      errno = error;          \
      return -1;              \
    }                         \
  } while (0)

/* --- files -------------------------------------------------------------------------------------------------------- */

static int opened(int below, int flags, int (*open_it)(int, const char*, int, mode_t), int directory, const char* path,
                  mode_t mode) {
  if (below) FAIL((flags & O_CREAT) && faccessat(directory, path, F_OK, 0) ? CREATES : READS);
  if (flags & O_CREAT) note_path(path);
  int file = open_it(directory, path, flags, mode);
  track(file, below && !(flags & O_DIRECTORY));
  return file;
}

static int real_openat(int directory, const char* path, int flags, mode_t mode) {
  static int (*real)(int, const char*, int, ...);
  if (!real) real = (int (*)(int, const char*, int, ...))dlsym(RTLD_NEXT, "openat");
  return real(directory, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name)                                                                            \
  int name(const char* path, int flags, ...) {                                                \
    va_list rest;                                                                             \
    va_start(rest, flags);                                                                    \
    mode_t mode = mode_of(flags, rest);                                                       \
    va_end(rest);                                                                             \
    return opened(is_below(AT_FDCWD, path), flags, real_openat, AT_FDCWD, path, mode);        \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                          \
  int name(int directory, const char* path, int flags, ...) {                                 \
    va_list rest;                                                                             \
    va_start(rest, flags);                                                                    \
    mode_t mode = mode_of(flags, rest);                                                       \
    va_end(rest);                                                                             \
    return opened(is_below(directory, path), flags, real_openat, directory, path, mode);      \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int file) {
  REAL(close);
  track(file, 0);
  return real(file);
}

/* The first write on a full disk is a short one, as of a disk that fills up. */
static size_t room(size_t size) {
  return active && is("full") && size > 1 ? size / 2 : size;
}

ssize_t write(int file, const void* content, size_t size) {
  REAL(write);
  if (is_tracked(file)) {
    int before = active;
    int error = fails(WRITES);
    if (error && !before && size > 1 && is("full")) return real(file, content, room(size));
    if (error) {
      errno = error;
      return -1;
    }
  }
  return real(file, content, size);
}

ssize_t writev(int file, const struct iovec* parts, int n) {
  REAL(writev);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file, parts, n);
}

ssize_t pwrite(int file, const void* content, size_t size, off_t offset) {
  REAL(pwrite);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file, content, size, offset);
}

ssize_t pwrite64(int file, const void* content, size_t size, off64_t offset) {
  REAL(pwrite64);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file, content, size, offset);
}

ssize_t read(int file, void* content, size_t size) {
  REAL(read);
  if (is_tracked(file)) FAIL(READS);
  return real(file, content, size);
}

int fsync(int file) {
  REAL(fsync);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file);
}

int ftruncate(int file, off_t size) {
  REAL(ftruncate);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file, size);
}

int ftruncate64(int file, off64_t size) {
  REAL(ftruncate64);
  if (is_tracked(file)) FAIL(WRITES);
  return real(file, size);
}

/* Renames and removals need no space, so a full disk has them. */
int rename(const char* from, const char* to) {
  REAL(rename);
  if (is_below(AT_FDCWD, to)) FAIL(READS);
  return real(from, to);
}

int renameat(int one, const char* from, int other, const char* to) {
  REAL(renameat);
  if (is_below(other, to)) FAIL(READS);
  return real(one, from, other, to);
}

int link(const char* from, const char* to) {
  REAL(link);
  if (is_below(AT_FDCWD, to)) FAIL(CREATES);
  return real(from, to);
}

int unlink(const char* path) {
  REAL(unlink);
  if (is_below(AT_FDCWD, path)) FAIL(READS);
  return real(path);
}

int unlinkat(int directory, const char* path, int flags) {
  REAL(unlinkat);
  if (is_below(directory, path)) FAIL(READS);
  return real(directory, path, flags);
}

int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  if (is_below(AT_FDCWD, path)) FAIL(CREATES);
  note_path(path);
  return real(path, mode);
}

/* --- shared memory, which glibc opens without the functions above -------------------------------------------------- */

int shm_open(const char* name, int flags, mode_t mode) {
  REAL(shm_open);
  if (flags & O_CREAT) note_memory("", name);
  return real(name, flags, mode);
}

sem_t* sem_open(const char* name, int flags, ...) {
  REAL(sem_open);
  if (!(flags & O_CREAT)) return real(name, flags);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  unsigned int value = va_arg(rest, unsigned int);
  va_end(rest);
  note_memory("sem.", name);
  return real(name, flags, mode, value);
}

/* --- the clock ---------------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec* now) {
  REAL(clock_gettime);
  int status = real(clock, now);
  if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shared->clock_jump;
  return status;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  REAL(gettimeofday);
  int status = real(now, zone);
  if (!status) now->tv_sec += shared->clock_jump;
  return status;
}

/* --- the network of a rank that is lost --------------------------------------------------------------------------- */

static int is_lost(int socket) {
  struct sockaddr_storage address;
  socklen_t size = sizeof address;
  if (!active || !is("lost") || getsockname(socket, (struct sockaddr*)&address, &size)) return 0;
  return address.ss_family == AF_INET || address.ss_family == AF_INET6;
}

#define ALIVE(socket)      \
  do {                     \
    if (is_lost(socket)) { \
      errno = ECONNRESET;  \
      return -1;           \
    }                      \
  } while (0)

ssize_t send(int socket, const void* content, size_t size, int flags) {
  REAL(send);
  ALIVE(socket);
  return real(socket, content, size, flags);
}

ssize_t sendmsg(int socket, const struct msghdr* message, int flags) {
  REAL(sendmsg);
  ALIVE(socket);
  return real(socket, message, flags);
}

ssize_t recv(int socket, void* content, size_t size, int flags) {
  REAL(recv);
  ALIVE(socket);
  return real(socket, content, size, flags);
}

ssize_t recvmsg(int socket, struct msghdr* message, int flags) {
  REAL(recvmsg);
  ALIVE(socket);
  return real(socket, message, flags);
}

int connect(int socket, const struct sockaddr* address, socklen_t size) {
  REAL(connect);
  ALIVE(socket);
  return real(socket, address, size);
}
