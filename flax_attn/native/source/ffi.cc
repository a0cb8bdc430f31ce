// The calls that XLA makes: arguments checked and taken apart, and handed to the kernels of the chosen level.

#include <atomic>
#include <vector>

#include "calls.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace flax_attn;

namespace {

class XlaPool : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& threads) : threads_(threads), count_(threads.num_threads()) {}
  int threads() const override { return static_cast<int>(count_); }
  void schedule(std::function<void()> work) override { threads_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool& threads_;
  int64_t count_;
};

std::vector<const Kernels*> levels() {
  std::vector<const Kernels*> found;
  for (const Kernels* level : {amx_kernels(), avx512_kernels(), avx2_kernels(), baseline_kernels()})
    if (level) found.push_back(level);
  return found;
}

std::atomic<const Kernels*> chosen{levels().front()};

// The sizes of an array of tokens and heads, all axes before these being one batch axis.
struct Sizes {
  int64_t b, tokens, heads, width;
  Sizes(ffi::AnyBuffer::Dimensions x, bool heads_first) {
    const size_t rank = x.size();
    b = 1;
    for (size_t i = 0; i + 3 < rank; ++i) b *= x[i];
    tokens = x[rank - (heads_first ? 2 : 3)];
    heads = x[rank - (heads_first ? 3 : 2)];
    width = x[rank - 1];
  }
};

template <typename T>
const T* data_or_null(ffi::AnyBuffer x) {
  return x.element_count() == 0 ? nullptr : static_cast<const T*>(x.untyped_data());
}

Type type_of(ffi::AnyBuffer x) {
  if (x.element_type() == ffi::DataType::BF16) return Type::bfloat16;
  return x.element_type() == ffi::DataType::F16 ? Type::float16 : Type::float32;
}

Attention attention(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer sinks,
                    ffi::AnyBuffer start, ffi::AnyBuffer stop, ffi::AnyBuffer query_segment,
                    ffi::AnyBuffer key_segment, float scale, float soft_cap, bool heads_first) {
  const Sizes q(query.dimensions(), false), k(key.dimensions(), heads_first), v(value.dimensions(), heads_first);
  return {q.b, q.tokens, k.tokens, q.heads, k.heads, q.width, v.width, type_of(query), heads_first, scale, soft_cap,
          query.untyped_data(), key.untyped_data(), value.untyped_data(), data_or_null<float>(sinks),
          static_cast<const int32_t*>(start.untyped_data()), static_cast<const int32_t*>(stop.untyped_data()),
          data_or_null<int32_t>(query_segment), data_or_null<int32_t>(key_segment)};
}

ffi::Error forward(ffi::ThreadPool threads, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                   ffi::AnyBuffer sinks, ffi::AnyBuffer start, ffi::AnyBuffer stop, ffi::AnyBuffer query_segment,
                   ffi::AnyBuffer key_segment, ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> top,
                   ffi::Result<ffi::AnyBuffer> total, float scale, float soft_cap, bool heads_first, bool few, bool differentiated) {
  XlaPool pool(threads);
  Forward x{attention(query, key, value, sinks, start, stop, query_segment, key_segment, scale, soft_cap, heads_first),
            output->untyped_data(), top->typed_data<float>(), total->typed_data<float>(), few, differentiated};
  chosen.load()->forward(x, pool);
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool threads, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                    ffi::AnyBuffer sinks, ffi::AnyBuffer start, ffi::AnyBuffer stop, ffi::AnyBuffer query_segment,
                    ffi::AnyBuffer key_segment, ffi::AnyBuffer output, ffi::AnyBuffer top, ffi::AnyBuffer total,
                    ffi::AnyBuffer cotangent, ffi::Result<ffi::AnyBuffer> d_query, ffi::Result<ffi::AnyBuffer> d_key,
                    ffi::Result<ffi::AnyBuffer> d_value, ffi::Result<ffi::AnyBuffer> delta, float scale,
                    float soft_cap, bool heads_first) {
  XlaPool pool(threads);
  Backward x{attention(query, key, value, sinks, start, stop, query_segment, key_segment, scale, soft_cap, heads_first),
             output.untyped_data(), cotangent.untyped_data(), top.typed_data<float>(), total.typed_data<float>(),
             d_query->untyped_data(), d_key->untyped_data(), d_value->untyped_data(), delta->typed_data<float>()};
  chosen.load()->backward(x, pool);
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer matrix,
                   ffi::Result<ffi::AnyBuffer> result, bool transposed) {
  XlaPool pool(threads);
  const auto rows = x.dimensions(), columns = result->dimensions();
  chosen.load()->product({rows[0], rows[1], columns[1], type_of(x), type_of(*result), transposed, x.untyped_data(),
                          matrix.untyped_data(), result->untyped_data()},
                         pool);
  return ffi::Error::Success();
}

// The result of "plain" and "transposed" is (m, ...), and that of "outer" (groups, ...).
ffi::Error grouped(ffi::ThreadPool threads, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer sizes,
                   ffi::Result<ffi::AnyBuffer> result, int64_t form) {
  XlaPool pool(threads);
  const GroupedForm chosen_form = static_cast<GroupedForm>(form);
  const auto matrices = chosen_form == GroupedForm::outer ? result->dimensions() : right.dimensions();
  chosen.load()->grouped({left.dimensions()[0], matrices[0], matrices[1], matrices[2], type_of(left), chosen_form,
                          left.untyped_data(), right.untyped_data(), sizes.typed_data<int32_t>(), result->untyped_data()},
                         pool);
  return ffi::Error::Success();
}

}  // namespace

#define EIGHT_ARGUMENTS \
  Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>() \
      .Arg<ffi::AnyBuffer>()
#define OPTIONS Attr<float>("scale").Attr<float>("soft_cap").Attr<bool>("heads_first")

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .EIGHT_ARGUMENTS.Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .OPTIONS.Attr<bool>("few")
                                  .Attr<bool>("differentiated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .EIGHT_ARGUMENTS.Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .OPTIONS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(matrix_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_product, grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("form"));

// The name of the i-th level that this processor has, quickest first; null beyond the last.
const char* level_name(int i) {
  const auto found = levels();
  return i < static_cast<int>(found.size()) ? found[i]->name : nullptr;
}

// Whether the processor is one of AMD's.
bool is_amd() {
#ifdef __x86_64__
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Makes the i-th level the one that all later calls run.
void choose_level(int i) { chosen = levels().at(i); }
}
#pragma GCC visibility pop
