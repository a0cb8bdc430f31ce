// Forward for many queries in bfloat16, on the tiles of AMX: products of 16 rows and 16 columns over 32 terms, summed in
// float32. Included inside the namespace of its level.
//
// As in forward.h queries lie on the columns, S^T = K Q^T and O^T = V^T P^T, so that the softmax is computed on the same
// panels. An instruction takes the left side as 16 rows of 32 terms, and the right side as 16 rows of two terms a column.

constexpr int64_t SIDE = 16;             // rows of a tile, and its columns in float32
constexpr int64_t TERMS = 32;            // of a product of two tiles
constexpr int64_t TILE = SIDE * TERMS;   // numbers in bfloat16
constexpr int64_t STRIDE = LANES * 4;    // bytes from a row of a panel to the next

// Gives this thread tiles of 16 rows of 64 bytes, and takes them away again.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
};

// 32 numbers of a row from number c on, 16 as the low halves of lanes, and pairs of 16 rows on the lanes; zeros beyond the
// width, or where there is no row.
static inline __m512i load_pairs(const BFloat16* row, int64_t c, int64_t width) {
  const int64_t count = row ? std::clamp<int64_t>(width - c, 0, TERMS) : 0;
  return _mm512_maskz_loadu_epi16(count == TERMS ? ~0u : (1u << count) - 1, count ? row + c : row);
}
static inline Bits half_bits(const BFloat16* row, int64_t c, int64_t width) {
  const int64_t count = row ? std::clamp<int64_t>(width - c, 0, SIDE) : 0;
  return (Bits)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << count) - 1, count ? row + c : row));
}
template <typename Put>
static inline void for_pair_columns(const BFloat16* const* rows, int64_t width, int64_t pairs, const Put& put) {
  for (int64_t c = 0; c < pairs; c += SIDE) {
    Vector block[SIDE];
    for (int64_t i = 0; i < SIDE; ++i) block[i] = (Vector)load_pairs(rows[i], 2 * c, width);
    transpose(block);
    for (int64_t i = 0; i < SIDE; ++i) put(c + i, (Ints)block[i]);
  }
}

// Copies TERMS rows as tiles of 16 of them, (2, width / TERMS, SIDE, TERMS), and writes zeros where there is none.
static inline void put_rows(const BFloat16* const* rows, int64_t width, uint16_t* to) {
  const int64_t tiles = blocks_of(width, TERMS);
  for (int64_t i = 0; i < TERMS; ++i)
    for (int64_t c = 0; c < tiles; ++c)
      _mm512_storeu_si512(to + (i / SIDE * tiles + c) * TILE + i % SIDE * TERMS, load_pairs(rows[i], c * TERMS, width));
}
// The same transposed, as (width / SIDE, SIDE, TERMS).
static inline void put_columns(const BFloat16* const* rows, int64_t width, uint16_t* to) {
  for (int64_t c = 0; c < width; c += SIDE, to += TILE) {
    Vector block[SIDE];
    for (int64_t i = 0; i < SIDE; ++i) {
      const Bits even = half_bits(rows[2 * i], c, width), odd = half_bits(rows[2 * i + 1], c, width);
      block[i] = (Vector)(even | odd << 16);
    }
    transpose(block);
    std::memcpy(to, block, sizeof block);
  }
}

// Keys (b, k, padded / SIDE, h / TERMS, SIDE, TERMS) and values, transposed, (b, k, padded / TERMS, v / SIDE, SIDE, TERMS),
// with h and v rounded up by zeros.
struct TileKeys : Keys {
  static constexpr int64_t GROUP = TERMS;  // tokens that are copied at once
  int64_t h, v, h_tiles, v_tiles;
  Array<uint16_t> key, value;

  explicit TileKeys(const Attention& x)
      : Keys(x, TERMS),
        h(x.h),
        v(x.v),
        h_tiles(blocks_of(h, TERMS)),
        v_tiles(blocks_of(v, SIDE)),
        key(x.b * x.k * padded * h_tiles * TERMS),
        value(x.b * x.k * padded * v_tiles * SIDE) {}

  const uint16_t* key_tile(int64_t at) const { return key + at / SIDE * h_tiles * TILE; }
  const uint16_t* value_tile(int64_t at) const { return value + at / TERMS * v_tiles * TILE; }

  // Copies rows from row `at` on.
  void copy(int64_t at, const BFloat16* const* from_key, const BFloat16* const* from_value) {
    put_rows(from_key, h, key + at / SIDE * h_tiles * TILE);
    put_columns(from_value, v, value + at / TERMS * v_tiles * TILE);
  }
};

// Two vectors as pairs in bfloat16, those of the first at even places.
typedef uint16_t Sixteens __attribute__((vector_size(VECTOR_BYTES)));
template <int... I>
static inline Sixteens interleave(Sixteens halves, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(halves, halves, (I / 2 + I % 2 * WIDTH)...);
}
static inline Sixteens pairs_of(Vector first, Vector second) {
  const Sixteens halves = (Sixteens)_mm512_cvtne2ps_pbh(second, first);
  return interleave(halves, std::make_integer_sequence<int, 2 * WIDTH>{});
}

// scores (count, LANES) = keys . queries
static void score_tiles(const uint16_t* key, const float* query, int64_t h_tiles, int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j += 2 * SIDE, key += 2 * h_tiles * TILE, scores += 2 * SIDE * LANES) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < h_tiles; ++c) {
      _tile_loadd(4, key + c * TILE, 64);
      _tile_loadd(5, key + (h_tiles + c) * TILE, 64);
      _tile_loadd(6, query + c * SIDE * LANES, STRIDE);
      _tile_loadd(7, query + c * SIDE * LANES + SIDE, STRIDE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores, STRIDE);
    _tile_stored(1, scores + SIDE, STRIDE);
    _tile_stored(2, scores + SIDE * LANES, STRIDE);
    _tile_stored(3, scores + SIDE * LANES + SIDE, STRIDE);
  }
}

// output (v, LANES) += values^T . weights
static void add_value_tiles(const uint16_t* value, const float* weights, int64_t v_tiles, int64_t count, float* output) {
  for (int64_t i = 0; i < v_tiles; ++i, value += TILE, output += SIDE * LANES) {
    _tile_loadd(0, output, STRIDE);
    _tile_loadd(1, output + SIDE, STRIDE);
    for (int64_t j = 0; j < count / TERMS; ++j) {
      _tile_loadd(4, value + j * v_tiles * TILE, 64);
      _tile_loadd(6, weights + j * SIDE * LANES, STRIDE);
      _tile_loadd(7, weights + j * SIDE * LANES + SIDE, STRIDE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, output, STRIDE);
    _tile_stored(1, output + SIDE, STRIDE);
  }
}

// Turns the scores, times a factor, into weights as pairs of two keys, (count / 2, LANES), relative to the largest so far.
static void weigh_pairs(const Attention& x, int64_t count, float factor, Panel& panel, const float* scores,
                        float* weights) {
  for (int half = 0; half < 2; ++half) {
    const float* column = scores + half * WIDTH;
    Vector most = fill(-INFINITY), other = most, total{}, more{};
    for (int64_t j = 0; j < count; j += 2) {
      most = maximum(load(column + j * LANES), most);
      other = maximum(load(column + (j + 1) * LANES), other);
    }
    const Vector top = maximum(maximum(most, other) * factor, panel.top[half]);
    for (int64_t j = 0; j < count; j += 2) {
      const Vector p = exp2(load(column + j * LANES) * factor - top);
      const Vector q = exp2(load(column + (j + 1) * LANES) * factor - top);
      store(weights + j / 2 * LANES + half * WIDTH, (Vector)pairs_of(p, q));
      total += p;
      more += q;
    }
    fold(x, half, top, total + more, panel);
  }
}

// The numbers of a call in bfloat16.
struct Tiles {
  static constexpr int64_t STEP = TERMS;
  using Type = BFloat16;
  using Registers = TileRegisters;
  TileKeys keys;

  Tiles(const Attention& x, Pool& pool) : keys(x) { copy_keys<BFloat16>(x, keys, pool); }

  static int64_t query_size(const Attention& x) { return round_up(x.h, TERMS) / 2 * LANES; }
  static int64_t output_size(const Attention& x) { return round_up(x.v, SIDE) * LANES; }
  static int64_t scores_size() { return KEYS * LANES + KEYS / 2 * LANES; }

  // Copies queries, or zeros, with the sign of the factor by which the scores are multiplied.
  static void copy_queries(const Attention& x, const BFloat16* const* queries, float* to) {
    const Ints sign = fill(std::signbit(x.scale) ? static_cast<int32_t>(0x80008000) : 0);
    for_pair_columns(queries, x.h, round_up(x.h, TERMS) / 2,
                     [&](int64_t c, Ints lanes) { store(to + c * LANES, (Vector)(lanes ^ sign)); });
  }

  void attend(const Attention& x, int64_t b, int64_t kv, int64_t first, int64_t last, Sight sight, Panel& panel,
              float* scores) const {
    const int64_t at = (b * x.k + kv) * keys.padded + first, count = last - first;
    float *weights = scores + KEYS * LANES, factor = std::abs(query_factor(x));
    score_tiles(keys.key_tile(at), panel.query, keys.h_tiles, count, scores);
    if (x.soft_cap > 0) {
      for (int64_t i = 0; i < count * LANES; i += WIDTH) store(scores + i, load(scores + i) * factor);
      cap_scores(scores, count * LANES, x.soft_cap);
      factor = 1;
    }
    hide(x, keys, b, kv, first, last, sight, panel, scores);
    weigh_pairs(x, count, factor, panel, scores, weights);
    add_value_tiles(keys.value_tile(at), weights, keys.v_tiles, count, panel.output);
  }
};
