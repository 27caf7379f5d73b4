/* A libamdhip64 with the four calls that rocm_msa/hip.py uses, under HIP's own prototypes. What a
   GPU would do is left to callbacks; a failure can be planted for any call. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*load_fn)(const void *image, uint64_t *module);
typedef int (*function_fn)(uint64_t module, const char *name, uint64_t *function);
typedef int (*launch_fn)(uint64_t function, const uint32_t *geometry, uint32_t lds,
                         uint64_t stream, const void *kernarg, size_t bytes);

enum { INVALID_VALUE = 1 };
static load_fn on_load;
static function_fn on_function;
static launch_fn on_launch;
static const char *failing = "";
static int failure;

void fake_hip_connect(load_fn load, function_fn function, launch_fn launch) {
  on_load = load;
  on_function = function;
  on_launch = launch;
}

/* `call` must live on. */
void fake_hip_fail(const char *call, int code) {
  failing = call;
  failure = code;
}

static int planted(const char *call) { return strcmp(call, failing) ? 0 : failure; }

const char *hipGetErrorName(int code) {
  switch (code) {
  case 0: return "hipSuccess";
  case 1: return "hipErrorInvalidValue";
  case 2: return "hipErrorOutOfMemory";
  case 200: return "hipErrorInvalidImage";
  case 209: return "hipErrorNoBinaryForGpu";
  case 500: return "hipErrorNotFound";
  default: return NULL;
  }
}

int hipModuleLoadData(void **module, const void *image) {
  int code = planted("hipModuleLoadData");
  return code ? code : on_load(image, (uint64_t *)module);
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
  int code = planted("hipModuleGetFunction");
  return code ? code : on_function((uint64_t)module, name, (uint64_t *)function);
}

int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned lds, void *stream, void **params,
                          void **extra) {
  int code = planted("hipModuleLaunchKernel");
  if (code) return code;
  /* HIP's tags: buffer pointer 1, buffer size 2, end 3 */
  if (params || !extra || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3)
    return INVALID_VALUE;
  const uint32_t geometry[6] = {gx, gy, gz, bx, by, bz};
  return on_launch((uint64_t)function, geometry, lds, (uint64_t)stream, extra[1],
                   *(size_t *)extra[3]);
}
