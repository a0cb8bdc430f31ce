// What forward and backward share: which keys a row may see, and the arrays of a call as they are stored. Included once
// for each instruction level, inside its namespace.

constexpr float LOG2_E = 1.44269504089f, LN_2 = 0.69314718056f;

static inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }
static inline int64_t round_up(int64_t size, int64_t multiple) { return blocks_of(size, multiple) * multiple; }
constexpr int64_t round_down(int64_t size, int64_t multiple) { return size / multiple * multiple; }

// Memory aligned for vectors, not set to zero.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size)
      : data_(static_cast<T*>(::operator new(std::max<int64_t>(size, 1) * sizeof(T), std::align_val_t{64}))) {}
  ~Array() { ::operator delete(data_, std::align_val_t{64}); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  operator T*() const { return data_; }

 private:
  T* data_;
};

// Where the heads and tokens of an array are: token i of head j of batch row b is at data + offset(b, i, j).
struct Layout {
  int64_t row, token, head;
  int64_t offset(int64_t b, int64_t i, int64_t j) const { return b * row + i * token + j * head; }
};
static inline Layout tokens_first(int64_t tokens, int64_t heads, int64_t width) {
  return {tokens * heads * width, heads * width, width};
}
static inline Layout keys_layout(const Attention& x, int64_t width) {
  if (x.heads_first) return {x.k * x.s * width, width, x.s * width};
  return tokens_first(x.s, x.k, width);
}

// What the queries are multiplied by, so that products with keys are what exp2, or first the soft cap, takes.
static inline float query_factor(const Attention& x) {
  return x.soft_cap > 0 ? x.scale / x.soft_cap : x.scale * LOG2_E;
}

// Whether all numbers times a factor are finite: 0 * x is 0 or NaN.
template <typename T>
static inline bool finite(const T* x, int64_t width, float factor = 1) {
  Vector check{};
  float rest = 0;
  int64_t i = 0;
  for (; i + WIDTH <= width; i += WIDTH) check += load(x + i) * factor * 0;
  for (; i < width; ++i) rest += read(x + i) * factor * 0;
  return sum(check) + rest == 0;
}

// Copies `width` numbers, times a factor, and returns whether all products are finite. Where not, zeros are written
// instead: a weight of zero does not keep NaN out of a product.
template <typename T>
static inline bool copy_finite(const T* from, float* to, int64_t width, float factor = 1) {
  const bool ok = finite(from, width, factor);
  int64_t i = 0;
  for (; i + WIDTH <= width; i += WIDTH) store(to + i, ok ? load(from + i) * factor : Vector{});
  for (; i < width; ++i) to[i] = ok ? read(from + i) * factor : 0;
  return ok;
}

// Where number c of token i is in an array of tiles of ROWS tokens, (tokens / ROWS, width, ROWS): the scalars that a
// register tile needs at once lie side by side.
static inline int64_t tiled(int64_t i, int64_t c, int64_t width) {
  return (i / ROWS * width + c) * ROWS + i % ROWS;
}

// The keys that some rows may see: none outside [start, stop); all of them see [inner_start, inner_stop).
struct Range {
  int64_t start = INT32_MAX, stop = 0, inner_start = 0, inner_stop = INT32_MAX;
  int32_t least_segment = INT32_MAX, greatest_segment = INT32_MIN;

  bool empty() const { return start >= stop; }
};
static inline Range range_of(const Attention& x, int64_t b, int64_t first, int64_t last) {
  Range range;
  for (int64_t i = b * x.t + first; i < b * x.t + last; ++i) {
    const int64_t start = std::max(x.start[i], 0), stop = std::min<int64_t>(x.stop[i], x.s);
    range.inner_start = std::max(range.inner_start, start);
    range.inner_stop = std::min(range.inner_stop, stop);
    if (start >= stop) continue;
    range.start = std::min(range.start, start);
    range.stop = std::max(range.stop, stop);
    if (!x.query_segment) continue;
    range.least_segment = std::min(range.least_segment, x.query_segment[i]);
    range.greatest_segment = std::max(range.greatest_segment, x.query_segment[i]);
  }
  return range;
}

// Whether rows of this range see all, some or none of the keys [first, last), and so whether a mask is needed.
enum class Sight { none, some, all };
static inline Sight sight_of(const Attention& x, int64_t b, const Range& range, int64_t first, int64_t last) {
  if (range.empty() || first >= range.stop || last <= range.start) return Sight::none;
  bool all = first >= range.inner_start && last <= range.inner_stop;
  if (x.key_segment) {
    const int32_t* ids = x.key_segment + b * x.s;
    const auto [least, greatest] = std::minmax_element(ids + first, ids + std::min(last, x.s));
    if (*least > range.greatest_segment || *greatest < range.least_segment) return Sight::none;
    all = all && *least == *greatest && *least == range.least_segment && *least == range.greatest_segment;
  }
  return all ? Sight::all : Sight::some;
}

// The keys and values of a call in float32, with s rounded up to whole tiles by zeros: read in place, rows that are far
// apart would share few sets of the cache.
struct Keys {
  int64_t padded;             // s
  Array<float> key, value;    // (b, k, padded, width), the keys in tiles
  Array<uint8_t> nonfinite;  // (b, k, padded)
  std::atomic<bool> any_nonfinite{false};

  explicit Keys(const Attention& x)
      : padded(round_up(x.s, ROWS)),
        key(x.b * x.k * padded * x.h),
        value(x.b * x.k * padded * x.v),
        nonfinite(x.b * x.k * padded) {}
};

template <typename T>
static void copy_keys(const Attention& x, Keys& keys, Pool& pool) {
  constexpr int64_t TOKENS = 256;  // of a task
  const int64_t blocks = blocks_of(keys.padded, TOKENS);
  const Layout key = keys_layout(x, x.h), value = keys_layout(x, x.v);
  parallel_for(pool, x.b * x.k * blocks, x.b * x.k * x.s * (x.h + x.v), [&](int, int64_t task) {
    const int64_t head = task / blocks, b = head / x.k, j = head % x.k, first = task % blocks * TOKENS;
    bool any = false;
    Array<float> row(x.h);
    for (int64_t i = first; i < std::min(first + TOKENS, keys.padded); ++i) {
      const int64_t at = head * keys.padded + i;
      if (i >= x.s) {
        for (int64_t c = 0; c < x.h; ++c) keys.key[tiled(at, c, x.h)] = 0;
        std::fill_n(keys.value + at * x.v, x.v, 0.0f);
        keys.nonfinite[at] = false;
        continue;
      }
      const bool key_ok = copy_finite<T>(static_cast<const T*>(x.key) + key.offset(b, i, j), row, x.h);
      for (int64_t c = 0; c < x.h; ++c) keys.key[tiled(at, c, x.h)] = row[c];
      const bool value_ok =
          copy_finite(static_cast<const T*>(x.value) + value.offset(b, i, j), keys.value + at * x.v, x.v);
      keys.nonfinite[at] = !key_ok || !value_ok;
      any |= keys.nonfinite[at];
    }
    if (any) keys.any_nonfinite = true;
  });
}
