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

// Asks for memory before it is needed, into the second cache: the first has too few requests under way at a time.
template <int64_t BYTES>
static inline void fetch(const void* from) {
  for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// WIDTH numbers of a row from number c on; zeros beyond its width, or where there is no row.
template <typename T>
static inline Vector load_or_zero(const T* row, int64_t c, int64_t width) {
  if (!row || c >= width) return Vector{};
  if (c + WIDTH <= width) return load(row + c);
  T rest[WIDTH] = {};
  std::copy_n(row + c, width - c, rest);
  return load(rest);
}

// Calls put(c, lanes) for each number c of WIDTH rows, which lies on the lanes.
template <typename T, typename Put>
static inline void for_columns(const T* const* rows, int64_t width, const Put& put) {
  for (int64_t c = 0; c < width; c += WIDTH) {
    Vector block[WIDTH];
    for (int64_t i = 0; i < WIDTH; ++i) block[i] = load_or_zero(rows[i], c, width);
    transpose(block);
    for (int64_t i = 0; i < std::min<int64_t>(WIDTH, width - c); ++i) put(c + i, block[i]);
  }
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

// Of a dense mask: -1 where it lets one of WIDTH keys be seen, from these on, of which there are `count`.
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
static inline Bytes dense_bytes(const uint8_t* keys, int64_t count) {
  Bytes bytes{};
  if (count >= WIDTH)
    __builtin_memcpy(&bytes, keys, sizeof bytes);
  else if (count > 0)
    std::copy_n(keys, count, reinterpret_cast<uint8_t*>(&bytes));
  return bytes != 0;
}
static inline Ints dense_lanes(const uint8_t* keys, int64_t count) {
  return __builtin_convertvector(dense_bytes(keys, count), Ints);
}
static inline bool any(Bytes x) {
  int8_t bits = 0;
  for (int i = 0; i < WIDTH; ++i) bits |= x[i];
  return bits != 0;
}

// What a dense mask leaves of the sight that queries [begin, end) of heads [head, heads) have of the keys [first, last),
// which are narrowed, in steps, to those that one of the queries sees.
static inline Sight narrow(const Attention& x, int64_t b, int64_t head, int64_t heads, int64_t begin, int64_t end,
                           int64_t step, int64_t& first, int64_t& last, Sight sight) {
  if (!x.dense || sight == Sight::none) return sight;
  heads = x.dense_head ? heads : head + 1;
  end = x.dense_query ? end : begin + 1;
  int64_t least = last, most = first;
  bool all = true;
  for (int64_t j = first; j < std::min(last, x.s); j += WIDTH) {
    Bytes one{}, every = ~Bytes{};
    for (int64_t n = head; n < heads; ++n)
      for (int64_t i = begin; i < end; ++i) {
        const Bytes seen = dense_bytes(x.dense_keys(b, n, i) + j, x.s - j);
        one |= seen;
        every &= seen;
      }
    all &= !any(~every);
    if (!any(one)) continue;
    least = std::min(least, j);
    most = j + WIDTH;
  }
  first = std::max(first, round_down(least, step));
  last = std::min(last, round_up(most, step));
  return first >= last ? Sight::none : all ? sight : Sight::some;
}

// Copies of the keys and values of a call, `padded` of each head: read in place, rows that are far apart would share few
// sets of the cache.
struct Keys {
  int64_t padded;             // s, rounded up
  Array<uint8_t> nonfinite;  // (b, k, padded)
  std::atomic<bool> any_nonfinite{false};

  Keys(const Attention& x, int64_t multiple) : padded(round_up(x.s, multiple)), nonfinite(x.b * x.k * padded) {}
};

// The same in float32.
struct FloatKeys : Keys {
  static constexpr int64_t GROUP = std::max(WIDTH, ROWS);  // tokens that are copied at once
  int64_t h, v;
  Array<float> key, value;  // (b, k, padded, width), the keys in tiles

  explicit FloatKeys(const Attention& x)
      : Keys(x, GROUP), h(x.h), v(x.v), key(x.b * x.k * padded * h), value(x.b * x.k * padded * v) {}

  // Copies rows from row `at` on, and writes zeros where there is none.
  template <typename T>
  void copy(int64_t at, const T* const* from_key, const T* const* from_value) {
    constexpr int64_t RUN = std::min(WIDTH, ROWS);  // of the lanes, within a tile
    for (int64_t i = 0; i < GROUP; i += WIDTH)
      for_columns(from_key + i, h, [&](int64_t c, Vector lanes) {
        for (int64_t lane = 0; lane < WIDTH; lane += RUN)
          std::memcpy(key + tiled(at + i + lane, c, h), reinterpret_cast<float*>(&lanes) + lane, RUN * sizeof(float));
      });
    for (int64_t i = 0; i < GROUP; ++i)
      for (int64_t c = 0; c < v; c += WIDTH) write(value + (at + i) * v + c, load_or_zero(from_value[i], c, v), v - c);
  }
};

template <typename T, typename Copies>
static void copy_keys(const Attention& x, Copies& keys, Pool& pool) {
  constexpr int64_t TOKENS = 256, GROUP = Copies::GROUP;  // of a task, and at once
  const int64_t blocks = blocks_of(keys.padded, TOKENS);
  const Layout key = keys_layout(x, x.h), value = keys_layout(x, x.v);
  parallel_for(pool, x.b * x.k * blocks, x.b * x.k * x.s * (x.h + x.v), [&](int, int64_t task) {
    const int64_t head = task / blocks, b = head / x.k, j = head % x.k, begin = task % blocks * TOKENS;
    bool any = false;
    for (int64_t first = begin; first < std::min(begin + TOKENS, keys.padded); first += GROUP) {
      const int64_t at = head * keys.padded + first;
      const T *from_key[GROUP] = {}, *from_value[GROUP] = {};
      for (int64_t i = 0; i < GROUP; ++i) {
        keys.nonfinite[at + i] = false;
        if (first + i >= x.s) continue;
        const T* one_key = static_cast<const T*>(x.key) + key.offset(b, first + i, j);
        const T* one_value = static_cast<const T*>(x.value) + value.offset(b, first + i, j);
        const bool key_ok = finite(one_key, x.h), value_ok = finite(one_value, x.v);
        if (key_ok) from_key[i] = one_key;
        if (value_ok) from_value[i] = one_value;
        keys.nonfinite[at + i] = !key_ok || !value_ok;
        any |= keys.nonfinite[at + i];
      }
      keys.copy(at, from_key, from_value);
    }
    if (any) keys.any_nonfinite = true;
  });
}
