// The kernels for every processor: SSE2, or NEON on aarch64, whose 32 registers hold a larger tile.
#include "includes.h"

#define LEVEL baseline
#define VECTOR_BYTES 16
#ifdef __aarch64__
#define ROWS 8
#else
#define ROWS 4
#endif
#include "level.h"

const flax_attn::Kernels* flax_attn::baseline_kernels() {
  static const Kernels kernels{"baseline", baseline::forward, baseline::backward, baseline::product, baseline::grouped, baseline::quantized};
  return &kernels;
}
