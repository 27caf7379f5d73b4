/* A libamdhip64 and a libcudart for rocm_msa/comm/runtime.py, whose device memory is shared memory
   of this machine: what another process opens is the same bytes. It is as strict as the real ones:
   handles of this process are refused, as are freed ones; what is mapped, freed or closed twice
   fails. A failure can be planted for any call, by its name without hip or cuda. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, UNCACHED = 3, PEER_ACCESS = 1, MOST = 64 };

typedef struct { char bytes[64]; } Handle;
typedef struct { void *address; size_t size; int file; } Block; /* file: -1 for a mapping */

static Block blocks[MOST];
static char failing[64];
static int failure;

void fake_peers_fail(const char *call, int code) {
  snprintf(failing, sizeof failing, "%s", call);
  failure = code;
}

/* Allocations (or mappings) of this process that live. */
int fake_peers_live(int mapped) {
  int count = 0;
  for (int i = 0; i < MOST; i++) count += blocks[i].address && (blocks[i].file < 0) == !!mapped;
  return count;
}

static int planted(const char *call) { return strcmp(call, failing) ? OK : failure; }

static Block *find(const void *address, int mapped) {
  for (int i = 0; i < MOST; i++)
    if (blocks[i].address == address && (!address || (blocks[i].file < 0) == !!mapped))
      return &blocks[i];
  return NULL;
}

static int map(void **address, size_t size, int file, int mapped) {
  Block *block = find(NULL, 0);
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (!block || at == MAP_FAILED) return OUT_OF_MEMORY;
  *block = (Block){at, size, mapped ? -1 : file};
  *address = at;
  return OK;
}

static int allocate(void **address, size_t size) {
  int file = memfd_create("fake_peers", 0);
  if (file < 0 || !size || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
  int code = map(address, size, file, 0);
  if (!code) memset(*address, 0xA5, size); /* as found */
  return code;
}

static int release(void *address, int mapped) {
  Block *block = address ? find(address, mapped) : NULL;
  if (!block) return INVALID_VALUE;
  munmap(block->address, block->size);
  if (!mapped) close(block->file);
  *block = (Block){0};
  return OK;
}

static int export_handle(Handle *handle, void *address) {
  Block *block = find(address, 0);
  if (!address || !block) return INVALID_VALUE;
  memset(handle, 0, sizeof *handle);
  snprintf(handle->bytes, sizeof *handle, "%d %d %zu", (int)getpid(), block->file, block->size);
  return OK;
}

static int open_handle(void **address, Handle handle, unsigned flags) {
  int pid, theirs;
  size_t size;
  char path[64];
  if (flags != PEER_ACCESS || sscanf(handle.bytes, "%d %d %zu", &pid, &theirs, &size) != 3 ||
      pid == (int)getpid())
    return INVALID_VALUE;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, theirs);
  int file = open(path, O_RDWR);
  if (file < 0) return INVALID_VALUE;
  int code = map(address, size, file, 1);
  close(file);
  return code;
}

static int fill(void *address, int value, size_t size) {
  Block *block = find(address, 0);
  if (!address || !block || size > block->size) return INVALID_VALUE;
  memset(address, value, size);
  return OK;
}

static const char *error_name(int code) {
  return code == OK ? "success" : code == INVALID_VALUE ? "invalid value"
       : code == OUT_OF_MEMORY ? "out of memory" : NULL;
}

#define CALL(name, ...) { int code = planted(name); return code ? code : __VA_ARGS__; }
#define RUNTIME(api)                                                                            \
  int api##IpcGetMemHandle(Handle *h, void *p) CALL("IpcGetMemHandle", export_handle(h, p))     \
  int api##IpcOpenMemHandle(void **p, Handle h, unsigned f)                                     \
      CALL("IpcOpenMemHandle", open_handle(p, h, f))                                            \
  int api##IpcCloseMemHandle(void *p) CALL("IpcCloseMemHandle", release(p, 1))                  \
  int api##Free(void *p) CALL("Free", release(p, 0))                                            \
  int api##Memset(void *p, int v, size_t n) CALL("Memset", fill(p, v, n))                       \
  int api##DeviceSynchronize(void) CALL("DeviceSynchronize", OK)                                \
  const char *api##GetErrorName(int code) { return error_name(code); }

RUNTIME(hip)
RUNTIME(cuda)
int hipExtMallocWithFlags(void **p, size_t n, unsigned flags)
    CALL("ExtMallocWithFlags", flags == UNCACHED ? allocate(p, n) : INVALID_VALUE)
int cudaMalloc(void **p, size_t n) CALL("Malloc", allocate(p, n))
