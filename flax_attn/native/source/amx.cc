// The kernels for processors with AMX: attention in bfloat16, and else those for AVX-512.
#include "includes.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define VECTOR_BYTES 64
#define ROWS 8

namespace flax_attn::amx {

#include "vector.h"
#include "rows.h"
#include "overflow.h"
#include "forward.h"
#include "tiles.h"
#include "backward.h"
#include "backward_tiles.h"

// The queries are copied with the sign of the scale.
static bool in_tiles(const Attention& x) { return x.type == Type::bfloat16 && x.scale != 0; }

static void forward(const Forward& x, Pool& pool) {
  if (in_tiles(x) && !x.few) return forward_many<Tiles>(x, pool);
  avx512_kernels()->forward(x, pool);
}

static void backward(const Backward& x, Pool& pool) {
  if (in_tiles(x)) return backward_all<BackwardTiles>(x, pool);
  avx512_kernels()->backward(x, pool);
}

// The processor has them, and Linux lets this process use them.
static bool supported() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return avx512bf16_kernels() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace flax_attn::amx

const flax_attn::Kernels* flax_attn::amx_kernels() {
  if (!amx::supported()) return nullptr;
  static const Kernels kernels{"amx", amx::forward, amx::backward, avx512bf16_kernels()->product,
                               avx512_kernels()->grouped, avx512bf16_kernels()->quantized};
  return &kernels;
}
#else
const flax_attn::Kernels* flax_attn::amx_kernels() { return nullptr; }
#endif
