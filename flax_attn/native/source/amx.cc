// The kernels for processors with AMX: attention and products in bfloat16, and else those for AVX-512.
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
#include "product.h"
#include "dots.h"
#include "quantized.h"
#include "quantized_dots.h"
#include "tile_product.h"

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

template <typename Result>
static void product_as(const MatrixProduct& x, Pool& pool) {
  if (!x.transposed) return multiply_few<BFloat16, BFloat16, Result, BFloat16>(x, pool);
  const float one = 1;
  const QuantizedProduct whole{x.m, 1, x.d_in, x.d_out, x.d_out, x.d_in, x.type, {}, x.x, x.matrix, &one, nullptr, nullptr};
  multiply_in_tiles<BFloat16, float>(whole, static_cast<Result*>(x.result), pool);
}

static void product(const MatrixProduct& x, Pool& pool) {
  if (x.type != Type::bfloat16 || x.m < TILES_FROM<BFloat16>) return avx512bf16_kernels()->product(x, pool);
  if (x.result_type == Type::float32) return product_as<float>(x, pool);
  product_as<BFloat16>(x, pool);
}

template <typename Code, typename Scale>
static void quantized_as(const QuantizedProduct& x, Pool& pool) {
  const int64_t groups = x.sizes ? x.groups - std::count(x.sizes, x.sizes + x.groups, 0) : 1;
  if (x.m < TILES_FROM<Code> * groups) return avx512bf16_kernels()->quantized(x, pool);
  multiply_in_tiles<Code, Scale>(x, x.result, pool);
}

static void quantized(const QuantizedProduct& x, Pool& pool) {
  if (x.type != Type::bfloat16) return avx512bf16_kernels()->quantized(x, pool);
  if (x.codes == Codes::int8) quantized_as<int8_t, float>(x, pool);
  if (x.codes == Codes::e4m3) quantized_as<E4M3, float>(x, pool);
  if (x.codes == Codes::e2m1) quantized_as<E2M1, E8M0>(x, pool);
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
  static const Kernels kernels{"amx", amx::forward, amx::backward, amx::product,
                               avx512_kernels()->grouped, amx::quantized};
  return &kernels;
}
#else
const flax_attn::Kernels* flax_attn::amx_kernels() { return nullptr; }
#endif
