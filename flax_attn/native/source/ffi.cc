// The calls that XLA makes: their arrays and options by name, checked, and handed to the kernels of
// the chosen level.

#include <atomic>
#include <cstring>
#include <vector>

#include "border.h"

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
  for (const Kernels* level : {amx_kernels(), avx512bf16_kernels(), avx512_kernels(), avx2_kernels(),
                               baseline_kernels()})
    if (level) found.push_back(level);
  return found;
}

std::atomic<const Kernels*> chosen{levels().front()};

struct ForwardOptions {
  float scale, soft_cap;
  bool heads_first, few;
  bool differentiated;  // not read: programs that were exported hold it
};
struct BackwardOptions {
  float scale, soft_cap;
  bool heads_first;
};
struct ProductOptions {
  bool transposed;
};
struct GroupedOptions {
  int64_t form;
};
struct QuantizedOptions {
  int64_t block_out, block_in;
};

// The arrays that forward and backward begin with.
struct AttentionArrays {
  Given query, key, value, sinks, start, stop, query_segment, key_segment, dense;
  explicit AttentionArrays(Border& border)
      : query(border.argument("query")),
        key(border.argument("key")),
        value(border.argument("value")),
        sinks(border.argument("sinks")),
        start(border.argument("start")),
        stop(border.argument("stop")),
        query_segment(border.argument("query_segment")),
        key_segment(border.argument("key_segment")) {}
  Sizes batch() const { return query.before(3); }
};

constexpr int64_t MOST_TOKENS =
    int64_t{1} << 30;  // such that an index of a key, and of what pads it, is an int32

// The sizes of a call, as far as each is that of one array. All axes before the last three are one
// batch axis.
template <typename Options>
Attention sizes_of(const AttentionArrays& x, const Options& options) {
  Attention call{};
  call.b = count_of(x.batch());
  call.t = x.query.behind(3), call.n = x.query.behind(2), call.h = x.query.behind(1);
  call.s = x.key.behind(options.heads_first ? 2 : 3),
  call.k = x.key.behind(options.heads_first ? 3 : 2);
  call.v = x.value.behind(1);
  call.type = x.query.number();
  call.heads_first = options.heads_first;
  call.scale = options.scale, call.soft_cap = options.soft_cap;
  return call;
}

void check_attention(Border& border, const AttentionArrays& x, const Attention& call) {
  const DataType type = x.query.type;
  const Sizes batch = x.batch();
  const int64_t first = call.heads_first ? call.k : call.s,
                second = call.heads_first ? call.s : call.k;
  const int64_t smallest = std::min({call.t, call.s, call.n, call.k, call.h, call.v});
  border.require(x.query.is_number(), "query must be float32, bfloat16 or float16");
  border.require(x.query.sizes.size() >= 4, "query must be (..., b, t, n, h)");
  border.require(x.key.is(type, batch, {first, second, call.h}),
                 "key must have the dtype of query, and be (..., b, s, k, h), or (..., b, k, s, h) "
                 "if heads_first");
  border.require(x.value.is(type, batch, {first, second, call.v}),
                 "value must have the dtype of query, and be (..., b, s, k, v), or (..., b, k, s, "
                 "v) if heads_first");
  border.require(smallest >= 1, "t, s, n, k, h and v must be at least 1");
  border.require(std::max(call.t, call.s) <= MOST_TOKENS, "t and s must be at most 2**30");
  border.require(call.k > 0 && call.n % call.k == 0,
                 "the heads k of key must divide the heads n of query");
  const int64_t sinks = x.sinks.behind(1) == 0 ? 0 : call.n;
  border.require(x.sinks.is(DataType::F32, batch, {sinks}),
                 "sinks must be float32, and (..., b, n) or (..., b, 0)");
  border.require(x.start.is(DataType::S32, batch, {call.t}),
                 "start must be int32, and (..., b, t)");
  border.require(x.stop.is(DataType::S32, batch, {call.t}), "stop must be int32, and (..., b, t)");
  const bool none = x.query_segment.behind(1) == 0 && x.key_segment.behind(1) == 0;
  border.require(x.query_segment.is(DataType::S32, batch, {none ? 0 : call.t}),
                 "query_segment must be int32, and (..., b, t), or (..., b, 0) beside a "
                 "key_segment of (..., b, 0)");
  border.require(x.key_segment.is(DataType::S32, batch, {none ? 0 : call.s}),
                 "key_segment must be int32, and (..., b, s), or (..., b, 0) beside a "
                 "query_segment of (..., b, 0)");
  const Sizes rows = x.dense.before(3);
  // One array serves all rows of the last of the batch's axes, or each has its own.
  const int64_t shared = x.dense.behind(4), each = x.query.behind(4);
  const bool rows_fit = rows.size() > 0 && rows.size() == batch.size() &&
                        std::equal(rows.begin(), rows.end() - 1, batch.begin()) &&
                        (shared == each || shared == 1);
  const int64_t heads = x.dense.behind(3) == 1 ? 1 : call.n;
  const int64_t queries = x.dense.behind(2) == 1 ? 1 : call.t;
  const bool dense_fits = rows_fit && x.dense.is(DataType::PRED, rows, {heads, queries, call.s});
  border.require(!x.dense.memory || dense_fits,
                 "dense must be bool, and (..., b or 1, n or 1, t or 1, s)");
  border.require(call.soft_cap >= 0, "soft_cap must be positive, or 0 for none");
}

// Where the arrays of a call are, once they are checked.
void point_to(const AttentionArrays& x, Attention& call) {
  call.query = x.query.data<void>(), call.key = x.key.data<void>(),
  call.value = x.value.data<void>();
  call.sinks = x.sinks.data<float>();
  call.start = x.start.data<int32_t>(), call.stop = x.stop.data<int32_t>();
  call.query_segment = x.query_segment.data<int32_t>(),
  call.key_segment = x.key_segment.data<int32_t>();
  call.dense = x.dense.data<uint8_t>();
  call.dense_rows = x.dense.behind(4) == 1 ? x.query.behind(4) : 1;
  call.dense_query = x.dense.behind(2) == 1 ? 0 : call.s;
  call.dense_head = x.dense.behind(3) == 1 ? 0 : x.dense.behind(2) * call.s;
  call.dense_row = x.dense.behind(3) * x.dense.behind(2) * call.s;
}

ffi::Error forward(ffi::ThreadPool threads, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, ForwardOptions options) {
  Border border("flax_attn.attention_forward", arguments, results);
  AttentionArrays x(border);
  x.dense = border.optional("dense");
  const Given output = border.result("output"), top = border.result("top"),
              total = border.result("total");
  Forward call{sizes_of(x, options)};
  check_attention(border, x, call);
  const bool wide = !options.few && output.type == DataType::F32;
  border.require(output.is(wide ? DataType::F32 : x.query.type, x.batch(), {call.t, call.n, call.v}),
                 "output must have the dtype of query, or be float32 unless few, and be (..., b, t, "
                 "n, v)");
  border.require(top.is(DataType::F32, x.batch(), {call.n, call.t}),
                 "top must be float32, and (..., b, n, t)");
  if (!border.require(total.is(DataType::F32, x.batch(), {call.n, call.t}),
                      "total must be float32, and (..., b, n, t)"))
    return border.error();
  if (call.b == 0) return ffi::Error::Success();
  point_to(x, call);
  call.output = output.data<void>(), call.top = top.data<float>(), call.total = total.data<float>();
  call.few = options.few, call.wide = wide;
  XlaPool pool(threads);
  chosen.load()->forward(call, pool);
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool threads, ffi::RemainingArgs arguments,
                    ffi::RemainingRets results, BackwardOptions options) {
  Border border("flax_attn.attention_backward", arguments, results);
  AttentionArrays x(border);
  const Given output = border.argument("output"), top = border.argument("top"),
              total = border.argument("total");
  const Given cotangent = border.argument("cotangent");
  x.dense = border.optional("dense");
  const Given d_query = border.result("d_query"), d_key = border.result("d_key"),
              d_value = border.result("d_value");
  const Given delta = border.result("delta");
  Backward call{sizes_of(x, options)};
  check_attention(border, x, call);
  const DataType type = x.query.type;
  const Sizes batch = x.batch();
  const bool wide = output.type == DataType::F32;
  border.require(output.is(wide ? DataType::F32 : type, batch, {call.t, call.n, call.v}),
                 "output must have the dtype of query, or be float32, and be (..., b, t, n, v)");
  border.require(cotangent.is(type, batch, {call.t, call.n, call.v}),
                 "cotangent must have the dtype of query, and be (..., b, t, n, v)");
  for (const Given& one : {top, total, delta})
    border.require(one.is(DataType::F32, batch, {call.n, call.t}),
                   "top, total and delta must be float32, and (..., b, n, t)");
  border.require(d_query.is(type, batch, {call.t, call.n, call.h}), "d_query must be as query");
  border.require(d_key.is(type, batch, {call.s, call.k, call.h}),
                 "d_key must have the dtype of query, and be (..., b, s, k, h)");
  if (!border.require(d_value.is(type, batch, {call.s, call.k, call.v}),
                      "d_value must have the dtype of query, and be (..., b, s, k, v)"))
    return border.error();
  if (call.b == 0) return ffi::Error::Success();
  point_to(x, call);
  call.output = output.data<void>(), call.cotangent = cotangent.data<void>(), call.wide = wide;
  call.top = top.data<float>(), call.total = total.data<float>(), call.delta = delta.data<float>();
  call.d_query = d_query.data<void>(), call.d_key = d_key.data<void>(),
  call.d_value = d_value.data<void>();
  XlaPool pool(threads);
  chosen.load()->backward(call, pool);
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool threads, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, ProductOptions options) {
  Border border("flax_attn.matrix_product", arguments, results);
  const Given x = border.argument("x"), matrix = border.argument("matrix"),
              result = border.result("result");
  MatrixProduct call{};
  call.m = x.behind(2), call.d_in = x.behind(1), call.d_out = result.behind(1);
  call.type = x.number(), call.result_type = result.number(), call.transposed = options.transposed;
  const int64_t rows = call.transposed ? call.d_out : call.d_in,
                columns = call.transposed ? call.d_in : call.d_out;
  border.require(x.is_number() && x.sizes.size() == 2,
                 "x must be float32, bfloat16 or float16, and (m, d_in)");
  border.require(
      matrix.is(x.type, {}, {rows, columns}),
      "matrix must have the dtype of x, and be (d_in, d_out), or (d_out, d_in) if transposed");
  if (!border.require(result.is(x.type, {}, {call.m, call.d_out}) ||
                          result.is(DataType::F32, {}, {call.m, call.d_out}),
                      "result must have the dtype of x or be float32, and be (m, d_out)"))
    return border.error();
  if (result.empty()) return ffi::Error::Success();
  if (call.d_in == 0) {
    std::memset(result.memory, 0, call.m * call.d_out * ffi::ByteWidth(result.type));
    return ffi::Error::Success();
  }
  call.x = x.data<void>(), call.matrix = matrix.data<void>(), call.result = result.data<void>();
  XlaPool pool(threads);
  chosen.load()->product(call, pool);
  return ffi::Error::Success();
}

ffi::Error grouped(ffi::ThreadPool threads, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, GroupedOptions options) {
  Border border("flax_attn.grouped_product", arguments, results);
  const Given left = border.argument("left"), right = border.argument("right"),
              sizes = border.argument("sizes");
  const Given result = border.result("result");
  const bool known = options.form >= 0 && options.form <= static_cast<int64_t>(GroupedForm::outer);
  GroupedProduct call{};
  call.form = known ? static_cast<GroupedForm>(options.form) : GroupedForm::plain;
  const bool outer = call.form == GroupedForm::outer,
             transposed = call.form == GroupedForm::transposed;
  const Given& matrices = outer ? result : right;
  call.m = left.behind(2), call.groups = matrices.behind(3), call.d_in = matrices.behind(2);
  call.d_out = matrices.behind(1), call.type = left.number();
  border.require(known, "form must be 0 (plain), 1 (transposed) or 2 (outer)");
  border.require(left.is_number(), "left must be float32, bfloat16 or float16");
  border.require(left.is(left.type, {}, {call.m, transposed ? call.d_out : call.d_in}),
                 "left must be (m, d_in), or (m, d_out) in the transposed form");
  border.require(matrices.is(left.type, {}, {call.groups, call.d_in, call.d_out}),
                 "the matrices must have the dtype of left, and be (groups, d_in, d_out)");
  const int64_t width = transposed ? call.d_in : call.d_out;
  border.require((outer ? right : result).is(left.type, {}, {call.m, width}),
                 "right, in the outer form, or the result must have the dtype of left, and be (m, "
                 "d_out), or (m, d_in) "
                 "in the transposed form");
  if (!border.require(sizes.is(DataType::S32, {}, {call.groups}),
                      "sizes must be int32, and (groups,)"))
    return border.error();
  if (result.empty()) return ffi::Error::Success();
  call.left = left.data<void>(), call.right = right.data<void>(),
  call.sizes = sizes.data<int32_t>();
  call.result = result.data<void>();
  XlaPool pool(threads);
  chosen.load()->grouped(call, pool);
  return ffi::Error::Success();
}

ffi::Error quantized(ffi::ThreadPool threads, ffi::RemainingArgs arguments,
                     ffi::RemainingRets results, QuantizedOptions options) {
  Border border("flax_attn.quantized_product", arguments, results);
  const Given x = border.argument("x"), matrix = border.argument("matrix"),
              scale = border.argument("scale");
  const Given sizes = border.optional("sizes"), result = border.result("result");
  QuantizedProduct call{};
  call.m = x.behind(2), call.d_in = x.behind(1), call.d_out = matrix.behind(2);
  call.block_out = options.block_out, call.block_in = options.block_in;
  call.groups = sizes.memory ? matrix.behind(3) : 1, call.type = x.number();
  const bool pairs = matrix.type == DataType::U8;
  call.codes = pairs ? Codes::e2m1 : matrix.type == DataType::S8 ? Codes::int8 : Codes::e4m3;
  const Sizes groups = sizes.memory ? matrix.before(2) : Sizes{};
  border.require(x.is_number() && x.sizes.size() == 2,
                 "x must be float32, bfloat16 or float16, and (m, d_in)");
  border.require(call.block_out >= 1 && call.block_in >= 1 &&
                     (call.block_in % 32 == 0 || call.block_in >= call.d_in),
                 "block_out must be at least 1, and block_in a multiple of 32, or at least d_in");
  border.require(pairs || matrix.type == DataType::S8 || matrix.type == DataType::F8E4M3FN,
                 "matrix must be int8, float8_e4m3fn or uint8");
  border.require(matrix.is(matrix.type, groups, {call.d_out, pairs ? call.d_in / 2 : call.d_in}) &&
                     (!pairs || call.d_in % 32 == 0) && (!sizes.memory || groups.size() == 1),
                 "matrix must be (d_out, d_in), or (groups, d_out, d_in) beside sizes; of uint8, "
                 "two numbers in each, d_in must be a multiple of 32");
  // A block of no numbers breaks the rule above.
  const int64_t height = std::max<int64_t>(call.block_out, 1), width = std::max<int64_t>(call.block_in, 1);
  const int64_t rows = call.d_out / height + (call.d_out % height > 0);
  const int64_t columns = call.d_in / width + (call.d_in % width > 0);
  border.require(scale.is(pairs ? DataType::U8 : DataType::F32, groups, {rows, columns}),
                 "scale must be float32, or uint8 beside a matrix of uint8, and have a number for "
                 "each block");
  border.require(!sizes.memory || sizes.is(DataType::S32, {}, {call.groups}),
                 "sizes must be int32, and (groups,)");
  if (!border.require(result.is(DataType::F32, {}, {call.m, call.d_out}),
                      "result must be float32, and (m, d_out)"))
    return border.error();
  if (result.empty()) return ffi::Error::Success();
  call.x = x.data<void>(), call.matrix = matrix.data<void>(), call.scale = scale.data<void>();
  call.sizes = sizes.data<int32_t>(), call.result = result.data<float>();
  XlaPool pool(threads);
  chosen.load()->quantized(call, pool);
  return ffi::Error::Success();
}

// New tokens in a cache, in place: XLA itself would copy a cache of 16 bits twice for each.
ffi::Error store_tokens(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  Border border("flax_attn.write_tokens", arguments, results);
  const Given cached = border.argument("cached"), added = border.argument("new"),
              slots = border.argument("slots"), result = border.result("result");
  const int64_t b = cached.behind(4), k = cached.behind(3), s = cached.behind(2), h = cached.behind(1),
                t = slots.behind(1);
  border.require((cached.type == DataType::BF16 || cached.type == DataType::F16) &&
                     cached.sizes.size() == 4,
                 "cached must be bfloat16 or float16, and (b, k, s, h)");
  border.require(added.is(cached.type, {}, {b, t, k, h}),
                 "new must have the dtype of cached, and be (b, t, k, h)");
  border.require(slots.is(DataType::S32, {}, {b, t}), "slots must be int32, and (b, t)");
  if (!border.require(result.is(cached.type, {}, {b, k, s, h}),
                      "result must have the dtype and the shape of cached"))
    return border.error();
  if (cached.empty()) return ffi::Error::Success();
  uint16_t* const to = result.data<uint16_t>();
  // XLA promises the same memory for both, and copies a cache that is read later on.
  if (to != cached.data<uint16_t>()) std::copy_n(cached.data<uint16_t>(), b * k * s * h, to);
  for (int64_t i = 0; i < b * t; ++i) {
    const int64_t slot = slots.data<int32_t>()[i];
    // A token that is not stored has the slot behind the last one.
    if (slot < 0 || slot >= s) continue;
    const uint16_t* const token = added.data<uint16_t>() + i * k * h;
    uint16_t* const row = to + i / t * k * s * h + slot * h;
    for (int64_t head = 0; head < k; ++head) std::copy_n(token + head * h, h, row + head * s * h);
  }
  return ffi::Error::Success();
}

// How XLA calls a function whose options are those of a struct.
template <typename Options>
auto bound() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs<Options>();
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(ForwardOptions, StructMember<float>("scale"),
                                      StructMember<float>("soft_cap"),
                                      StructMember<bool>("heads_first"), StructMember<bool>("few"),
                                      StructMember<bool>("differentiated"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(BackwardOptions, StructMember<float>("scale"),
                                      StructMember<float>("soft_cap"),
                                      StructMember<bool>("heads_first"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(ProductOptions, StructMember<bool>("transposed"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(GroupedOptions, StructMember<int64_t>("form"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(QuantizedOptions, StructMember<int64_t>("block_out"),
                                      StructMember<int64_t>("block_in"));

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_forward, forward, bound<ForwardOptions>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_backward, backward, bound<BackwardOptions>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(matrix_product, product, bound<ProductOptions>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(write_tokens, store_tokens,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_product, grouped, bound<GroupedOptions>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized_product, quantized, bound<QuantizedOptions>());

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
