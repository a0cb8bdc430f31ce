// All kernels, in the namespace LEVEL, for vectors of VECTOR_BYTES and register tiles of ROWS scalars by two vectors.


namespace flax_attn::LEVEL {

#include "vector.h"
#include "rows.h"
#include "overflow.h"
#include "forward.h"
#include "few.h"
#include "backward.h"
#include "product.h"
#include "grouped.h"
#include "quantized.h"

template <typename Arguments, typename F>
static void by_type(const Arguments& x, F run) {
  if (x.type == Type::float32) run(float{});
  if (x.type == Type::bfloat16) run(BFloat16{});
  if (x.type == Type::float16) run(Float16{});
}

static void forward(const Forward& x, Pool& pool) {
  by_type(x, [&](auto number) {
    if (x.few)
      forward_few<decltype(number)>(x, pool);
    else
      forward_many<Float32<decltype(number)>>(x, pool);
  });
}

static void backward(const Backward& x, Pool& pool) {
  by_type(x, [&](auto number) { backward_all<BackwardFloats<decltype(number)>>(x, pool); });
}

static void product(const MatrixProduct& x, Pool& pool) {
  by_type(x, [&](auto number) {
    using Number = decltype(number);
    if (x.result_type == Type::float32)
      multiply_few<Number, Number, float>(x, pool);
    else
      multiply_few<Number, Number, Number>(x, pool);
  });
}

static void grouped(const GroupedProduct& x, Pool& pool) {
  by_type(x, [&](auto number) { multiply_groups<decltype(number)>(x, pool); });
}

static void quantized(const QuantizedProduct& x, Pool& pool) {
  by_type(x, [&](auto number) {
    using Number = decltype(number);
    if (x.codes == Codes::int8) multiply_held<Number, InFloats<int8_t>, int8_t, float>(x, pool);
    if (x.codes == Codes::e4m3) multiply_held<Number, InFloats<E4M3>, E4M3, float>(x, pool);
    if (x.codes == Codes::e2m1) multiply_held<Number, InFloats<E2M1>, E2M1, E8M0>(x, pool);
  });
}

}  // namespace flax_attn::LEVEL
