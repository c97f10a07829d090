// What a decoder layer computes between its matrix products, for rows in float32 or bfloat16, computed in float32.
//
// One source for every processor: the compiler gets the instruction set (build.py), and `Lanes` is as wide as it.
// Every row is computed alone and in one order, so a result depends neither on the other rows nor on the number of
// threads. `parallel_for` is PyTorch's, by which these functions use PyTorch's threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
#define INLINE static inline __attribute__((always_inline))
typedef float Lanes __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t IntLanes __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * WIDTH), aligned(2)));

typedef int (*ParallelFor)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);

struct BFloat16 {
    uint16_t bits;
};

INLINE Lanes load(const float *p) { return *reinterpret_cast<const Lanes *>(p); }
INLINE void store(float *p, Lanes x) { *reinterpret_cast<Lanes *>(p) = x; }
INLINE Lanes load(const BFloat16 *p) {
    WordLanes words = __builtin_convertvector(*reinterpret_cast<const HalfLanes *>(p), WordLanes) << 16;
    return reinterpret_cast<Lanes>(words);
}
INLINE void store(BFloat16 *p, Lanes x) {
    WordLanes words = reinterpret_cast<WordLanes>(x);
    WordLanes rounded = words + 0x7fff + ((words >> 16) & 1);  // to nearest, ties to even
    rounded = x == x ? rounded : words | 0x400000;             // a nan stays one
    *reinterpret_cast<HalfLanes *>(p) = __builtin_convertvector(rounded >> 16, HalfLanes);
}
INLINE Lanes broadcast(float x) { return Lanes{} + x; }
INLINE void store_one(float *p, float x) { *p = x; }
INLINE void store_one(BFloat16 *p, float x) {
    BFloat16 all[WIDTH];
    store(all, broadcast(x));
    *p = all[0];
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE float total(Lanes x) {
    float sum = 0;
    for (int lane = 0; lane < WIDTH; lane++) sum += x[lane];
    return sum;
}
INLINE float largest(Lanes x) {
    float top = x[0];
    for (int lane = 1; lane < WIDTH; lane++) top = x[lane] > top ? x[lane] : top;
    return top;
}

// The sum of each of WIDTH vectors: neighbours are interleaved and added until each lane holds one sum.
INLINE Lanes totals(const Lanes *x) {
#if defined(__AVX512F__)
    __m512 fours[4], eights[2];
    for (int i = 0; i < 4; i++) {
        const Lanes *v = x + 4 * i;
        __m512 a = _mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]) + _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]);
        __m512 b = _mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]) + _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]);
        fours[i] = (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b) + (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
    }
    for (int i = 0; i < 2; i++)
        eights[i] = _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88) +
                    _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd);
    return (Lanes)(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88) + _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
#elif defined(__AVX2__)
    __m256 fours[2];
    for (int i = 0; i < 2; i++) {
        const Lanes *v = x + 4 * i;
        __m256 a = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]) + _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
        __m256 b = _mm256_unpacklo_ps((__m256)v[2], (__m256)v[3]) + _mm256_unpackhi_ps((__m256)v[2], (__m256)v[3]);
        fours[i] = (__m256)_mm256_unpacklo_pd((__m256d)a, (__m256d)b) + (__m256)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
    }
    return (Lanes)(_mm256_permute2f128_ps(fours[0], fours[1], 0x20) + _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
    Lanes sums;
    for (int i = 0; i < WIDTH; i++) sums[i] = total(x[i]);
    return sums;
#endif
}

// e^x to 2e-7 of its value for x <= 88, 0 below -87; nan stays nan. Cephes' polynomial.
INLINE Lanes exponential(Lanes x) {
    Lanes bounded = x < -87.0f ? broadcast(-87.0f) : x;
    Lanes power = (bounded * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounded to a whole number
    Lanes r = bounded - power * 0.693359375f;
    r = r - power * -2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    Lanes y = p * r * r + r + 1.0f;
    IntLanes exponent = (__builtin_convertvector(power, IntLanes) + 127) << 23;
    return x < -87.0f ? Lanes{} : y * reinterpret_cast<Lanes>(exponent);
}

template <class T> INLINE float largest_of(const T *x, int64_t size) {
    float top = to_float(x[0]);
    int64_t i = 0;
    Lanes tops = broadcast(top);
    for (; i + WIDTH <= size; i += WIDTH) {
        Lanes more = load(x + i);
        tops = more > tops ? more : tops;
    }
    top = largest(tops);
    for (; i < size; i++) top = to_float(x[i]) > top ? to_float(x[i]) : top;
    return top;
}

template <class T> INLINE float norm_scale(const T *x, int64_t width, float epsilon) {
    Lanes squares = {};
    for (int64_t i = 0; i < width; i += WIDTH) squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(total(squares) / width + epsilon);
}

// RMSNorm and its gradient: the rows' scales are kept. Rows are added up in blocks of `ROWS`, for any number of threads.
constexpr int64_t ROWS = 64;

template <class T> struct Norm {
    const T *x, *weight, *gradient;
    T *out;        // of the forward the normed rows, of the backward the gradient of `x`
    float *scales; // [rows]
    float *sums;   // [blocks, width] of the backward: the gradient of `weight`
    int64_t rows, width;
    float epsilon;

    INLINE void forward(int64_t from, int64_t to, void *self) {
        const Norm &n = *static_cast<Norm *>(self);
        for (int64_t row = from; row < to; row++) {
            const T *x = n.x + row * n.width;
            float scale = n.scales[row] = norm_scale(x, n.width, n.epsilon);
            for (int64_t i = 0; i < n.width; i += WIDTH)
                store(n.out + row * n.width + i, load(x + i) * scale * load(n.weight + i));
        }
    }

    INLINE void backward(int64_t from, int64_t to, void *self) {
        const Norm &n = *static_cast<Norm *>(self);
        for (int64_t block = from; block < to; block++) {
            float *sums = n.sums + block * n.width;
            for (int64_t row = block * ROWS; row < n.rows && row < (block + 1) * ROWS; row++) {
                const T *x = n.x + row * n.width, *gradient = n.gradient + row * n.width;
                float scale = n.scales[row];
                Lanes along = {};
                for (int64_t i = 0; i < n.width; i += WIDTH) along += load(gradient + i) * load(n.weight + i) * load(x + i);
                float mean = total(along) / n.width * scale * scale;
                for (int64_t i = 0; i < n.width; i += WIDTH) {
                    Lanes g = load(gradient + i), value = load(x + i);
                    store(sums + i, load(sums + i) + g * value * scale);
                    store(n.out + row * n.width + i, (g * load(n.weight + i) - value * mean) * scale);
                }
            }
        }
    }
};

// silu(gate) * up, and its gradients.
template <class T> struct Gate {
    const T *gate, *up, *gradient;
    T *out, *of_up;  // of the backward the gradients of `gate` and `up`

    INLINE Lanes sigmoid(Lanes x) {
        Lanes power = exponential(x > 0.0f ? -x : x);  // of -|x|, which is never too large
        return (x > 0.0f ? broadcast(1.0f) : power) / (1.0f + power);
    }
    INLINE void forward(int64_t from, int64_t to, void *self) {
        const Gate &s = *static_cast<Gate *>(self);
        for (int64_t i = from * WIDTH; i < to * WIDTH; i += WIDTH) {
            Lanes gate = load(s.gate + i);
            store(s.out + i, gate * sigmoid(gate) * load(s.up + i));
        }
    }
    INLINE void backward(int64_t from, int64_t to, void *self) {
        const Gate &s = *static_cast<Gate *>(self);
        for (int64_t i = from * WIDTH; i < to * WIDTH; i += WIDTH) {
            Lanes gate = load(s.gate + i), gradient = load(s.gradient + i), open = sigmoid(gate);
            store(s.of_up + i, gradient * gate * open);
            store(s.out + i, gradient * load(s.up + i) * open * (1.0f + gate * (1.0f - open)));
        }
    }
};

template <class T> struct Addition {
    const T *values;
    float *sums;
    static void run(int64_t from, int64_t to, void *self) {
        const Addition &a = *static_cast<Addition *>(self);
        for (int64_t i = from; i < to; i++) a.sums[i] += to_float(a.values[i]);
    }
};

// Rotary embedding in place of the first heads of each row `[heads_of_row, width]`; with weights, their RMSNorm first.
// `cosines` and `sines` repeat after `angle_rows` rows.
template <class T>
INLINE void rotate_rows(T *rows, const T *cosines, const T *sines, const T *query_weight, const T *key_weight,
                        int64_t num_rows, int64_t angle_rows, int64_t query_heads, int64_t key_heads,
                        int64_t heads_of_row, int64_t width, float epsilon) {
    int64_t half = width / 2;
    for (int64_t row = 0; row < num_rows; row++) {
        const T *cosine = cosines + (row % angle_rows) * width, *sine = sines + (row % angle_rows) * width;
        for (int64_t head = 0; head < query_heads + key_heads; head++) {
            T *x = rows + (row * heads_of_row + head) * width;
            const T *weight = head < query_heads ? query_weight : key_weight;
            float scale = weight ? norm_scale(x, width, epsilon) : 1.0f;
            for (int64_t i = 0; i < half; i += WIDTH) {
                Lanes first = load(x + i), second = load(x + half + i);
                if (weight) {
                    first *= scale * load(weight + i);
                    second *= scale * load(weight + half + i);
                }
                store(x + i, first * load(cosine + i) - second * load(sine + i));
                store(x + half + i, second * load(cosine + half + i) + first * load(sine + half + i));
            }
        }
    }
}

// Copy one position per row: `[heads, width]` keys, then as many values, to `positions[row]` of `[rows, heads, capacity, width]`.
template <class T>
INLINE void store_rows(const T *states, T *keys, T *values, const int64_t *positions, int64_t rows, int64_t row_stride,
                       int64_t heads, int64_t width, int64_t capacity) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = ((row * heads + head) * capacity + positions[row]) * width;
            const T *key = states + row * row_stride + head * width;
            memcpy(keys + at, key, width * sizeof(T));
            memcpy(values + at, key + heads * width, width * sizeof(T));
        }
}

constexpr int64_t BLOCK = 64, MAX_QUERIES = 16, MAX_WIDTH = 256;

// The attention of some queries to the keys so far: the largest score, the sum of exponentials, the sum of values.
struct Partial {
    float top[MAX_QUERIES], sum[MAX_QUERIES], values[MAX_QUERIES][MAX_WIDTH];
};

INLINE const float *as_floats(const float *states, int64_t, float *) { return states; }
INLINE const float *as_floats(const BFloat16 *states, int64_t count, float *buffer) {
    for (int64_t i = 0; i < count; i += WIDTH) store(buffer + i, load(states + i));
    return buffer;
}

// Add the values `[count, width]` times the scores of Q queries to their sums.
template <int Q>
INLINE void add_values(const float (*scores)[BLOCK], const float *values, int64_t count, int64_t width, float (*sums)[MAX_WIDTH]) {
    for (int64_t x = 0; x < width; x += 2 * WIDTH) {
        Lanes own[Q][2];
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < 2; v++) own[i][v] = load(sums[i] + x + v * WIDTH);
        for (int64_t key = 0; key < count; key++)
            for (int v = 0; v < 2; v++) {
                Lanes value = load(values + key * width + x + v * WIDTH);
#pragma GCC unroll 4
                for (int i = 0; i < Q; i++) own[i][v] += scores[i][key] * value;
            }
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < 2; v++) store(sums[i] + x + v * WIDTH, own[i][v]);
    }
}

// Attend from the queries `of .. of + queries` to the positions `[count, width]` of one head.
template <class T>
INLINE void attend(const float *query, int64_t queries, const T *keys, const T *values, int64_t count, int64_t width,
                   float scale, Partial &partial, int64_t of = 0) {
    float scores[MAX_QUERIES][BLOCK], buffer[sizeof(T) == 4 ? 1 : BLOCK * MAX_WIDTH];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t length = count - start < BLOCK ? count - start : BLOCK;
        const float *states = as_floats(keys + start * width, length * width, buffer);
        for (int64_t key = 0; key < length; key += WIDTH)
            for (int64_t i = 0; i < queries; i++) {
                Lanes products[WIDTH] = {};
                for (int64_t k = 0; k < WIDTH && key + k < length; k += 4) {
                    const float *four[4];
                    for (int j = 0; j < 4; j++)  // the last one again where there are fewer
                        four[j] = states + (key + k + j < length ? key + k + j : length - 1) * width;
                    Lanes sums[4] = {};
                    for (int64_t x = 0; x < width; x += WIDTH) {
                        Lanes part = load(query + (of + i) * width + x);
#pragma GCC unroll 4
                        for (int j = 0; j < 4; j++) sums[j] += part * load(four[j] + x);
                    }
                    for (int j = 0; j < 4; j++) products[k + j] = sums[j];
                }
                store(scores[i] + key, totals(products) * scale);
            }
        for (int64_t i = 0; i < queries; i++) {
            for (int64_t key = length; key < BLOCK; key++) scores[i][key] = -INFINITY;
            Lanes tops = load(scores[i]);
            for (int64_t key = WIDTH; key < BLOCK; key += WIDTH) {
                Lanes more = load(scores[i] + key);
                tops = more > tops ? more : tops;
            }
            float top = largest(tops), before = partial.top[of + i];
            top = top > before ? top : before;
            float kept = before == -INFINITY ? 0.0f : exponential(broadcast(before - top))[0];
            Lanes sums = {};
            for (int64_t key = 0; key < BLOCK; key += WIDTH) {
                Lanes weight = exponential(load(scores[i] + key) - top);
                store(scores[i] + key, weight);
                sums += weight;
            }
            partial.top[of + i] = top;
            partial.sum[of + i] = partial.sum[of + i] * kept + total(sums);
            if (kept != 1.0f)
                for (int64_t x = 0; x < width; x += WIDTH) store(partial.values[of + i] + x, load(partial.values[of + i] + x) * kept);
        }
        states = as_floats(values + start * width, length * width, buffer);
        for (int64_t i = 0; i < queries; i += 4) {
            auto *own = partial.values + of + i;
            if (queries - i >= 4) add_values<4>(scores + i, states, length, width, own);
            else if (queries - i == 3) add_values<3>(scores + i, states, length, width, own);
            else if (queries - i == 2) add_values<2>(scores + i, states, length, width, own);
            else add_values<1>(scores + i, states, length, width, own);
        }
    }
}

// Row `row` attends to its prompt, if `prompt_of[row]` is one, and to its own positions `first[row] .. lengths[row]`. Those
// before `split[row]` come first, in blocks of their own: a prompt gives equal bits in the row and outside of it.
template <class T> struct Attention {
    const T *query, *keys, *values;
    T *out;
    const int64_t *first, *split, *lengths, *prompt_of, *prompt_lengths;
    const T *const *prompt_keys, *const *prompt_values;
    int64_t rows, row_stride, key_heads, group, width, capacity;
    float scale;

    INLINE void run_heads(int64_t from, int64_t to, void *self) {
        const Attention &a = *static_cast<Attention *>(self);
        Partial partial;
        float queries[MAX_QUERIES * MAX_WIDTH];
        for (int64_t task = from, rows; task < to; task += rows) {
            // consecutive rows of one prompt read it together, as far as their queries fit
            int64_t head = task / a.rows, row = task % a.rows, prompt = a.prompt_of ? a.prompt_of[row] : -1;
            int64_t limit = MAX_QUERIES / a.group, end = to < (head + 1) * a.rows ? to : (head + 1) * a.rows;
            for (rows = 1; prompt >= 0 && rows < limit && task + rows < end && a.prompt_of[row + rows] == prompt;) rows++;
            for (int64_t start = 0; start < a.group; start += MAX_QUERIES) {
                int64_t count = a.group - start < MAX_QUERIES ? a.group - start : MAX_QUERIES;
                int64_t offset = (head * a.group + start) * a.width;
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t i = 0; i < count * a.width; i += WIDTH)
                        store(queries + r * count * a.width + i, load(a.query + (row + r) * a.row_stride + offset + i));
                for (int64_t i = 0; i < rows * count; i++) {
                    partial.top[i] = -INFINITY;
                    partial.sum[i] = 0;
                    memset(partial.values[i], 0, a.width * sizeof(float));
                }
                if (prompt >= 0) {
                    int64_t length = a.prompt_lengths[prompt];
                    attend(queries, rows * count, a.prompt_keys[prompt] + head * length * a.width,
                           a.prompt_values[prompt] + head * length * a.width, length, a.width, a.scale, partial);
                }
                for (int64_t r = 0; r < rows; r++) {
                    int64_t first = a.first[row + r], last = a.lengths[row + r], middle = a.split[row + r];
                    int64_t at = ((row + r) * a.key_heads + head) * a.capacity;
                    middle = middle < first ? first : middle > last ? last : middle;
                    attend(queries, count, a.keys + (at + first) * a.width, a.values + (at + first) * a.width,
                           middle - first, a.width, a.scale, partial, r * count);
                    attend(queries, count, a.keys + (at + middle) * a.width, a.values + (at + middle) * a.width,
                           last - middle, a.width, a.scale, partial, r * count);
                    T *out = a.out + (row + r) * a.key_heads * a.group * a.width + offset;
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t x = 0; x < a.width; x += WIDTH)
                            store(out + i * a.width + x,
                                  load(partial.values[r * count + i] + x) / partial.sum[r * count + i]);
                }
            }
        }
    }
};

constexpr int64_t TOKENS = 256;  // of a block of the cumulative distribution

// Draw `ends[row] - ends[row - 1]` tokens from each row of logits by the inverse of the cumulative distribution.
template <class T> struct Sampling {
    const T *logits;
    const double *temperatures, *uniforms;
    const int64_t *ends;
    int64_t *tokens;
    float *logprobs;
    double *sums;  // [rows, blocks]
    int64_t vocabulary;

    INLINE Lanes weights(const T *x, int64_t i, int64_t end, float top, float inverse) {
        if (i + WIDTH <= end) return exponential((load(x + i) - top) * inverse);
        Lanes last = broadcast(-INFINITY);
        for (int64_t lane = 0; i + lane < end; lane++) last[lane] = to_float(x[i + lane]);
        return exponential((last - top) * inverse);
    }

    INLINE void run_rows(int64_t from, int64_t to, void *self) {
        const Sampling &s = *static_cast<Sampling *>(self);
        int64_t size = s.vocabulary, blocks = (size + TOKENS - 1) / TOKENS;
        for (int64_t row = from; row < to; row++) {
            const T *x = s.logits + row * size;
            double *sums = s.sums + row * blocks, sum = 0;
            float top = largest_of(x, size), inverse = float(1.0 / s.temperatures[row]);
            for (int64_t block = 0; block < blocks; block++) {
                int64_t end = (block + 1) * TOKENS < size ? (block + 1) * TOKENS : size;
                Lanes of_block = {};
                for (int64_t i = block * TOKENS; i < end; i += WIDTH) of_block += weights(x, i, end, top, inverse);
                sums[block] = sum += total(of_block);
            }
            for (int64_t draw = row ? s.ends[row - 1] : 0; draw < s.ends[row]; draw++) {
                double target = s.uniforms[draw] * sum;
                int64_t block = 0, chosen = -1;
                while (block < blocks - 1 && !(sums[block] > target)) block++;
                while (block > 0 && sums[block] == sums[block - 1]) block--;  // the last ones may have no mass
                double reached = block ? sums[block - 1] : 0;
                int64_t end = (block + 1) * TOKENS < size ? (block + 1) * TOKENS : size;
                for (int64_t i = block * TOKENS; i < end && !(reached > target && chosen >= 0); i += WIDTH) {
                    Lanes weight = weights(x, i, end, top, inverse);
                    for (int64_t lane = 0; lane < WIDTH && !(reached > target && chosen >= 0); lane++)
                        if (weight[lane] > 0) {
                            chosen = i + lane;
                            reached += weight[lane];
                        }
                }
                s.tokens[draw] = chosen < 0 ? 0 : chosen;  // no weight is positive where a logit is not finite
                s.logprobs[draw] = float(double((to_float(x[s.tokens[draw]]) - top) * inverse) - log(sum));
            }
        }
    }
};

// Products of rows with a weight in panels: `[panels, inputs, PANEL]` in float32, `[panels, inputs / 2, PANEL, 2]` in
// bfloat16, the last panel filled up with zeros. Tiles of at most TILE rows times a panel are added up in registers, over the inputs in their order. bfloat16 is
// multiplied by the processor's instruction for the products of pairs, where it has one.
constexpr int VECTORS = 2, PANEL = VECTORS * WIDTH;
#ifdef __AVX512F__
constexpr int TILE = 12;
#define PAIRS __attribute__((target("avx512bf16")))
#else
constexpr int TILE = 6;
#endif
constexpr int64_t ROW_BLOCK = 96;  // the rows that stay in the cache while all panels are read

enum Finish { PLAIN, SILU, PLUS, TIMES };

template <class T> struct Product {
    const T *x, *weight, *bias, *other;
    T *out;
    int64_t rows, inputs, outputs, how;
};

template <int N> static void add_up(const Product<float> &p, int64_t row, int64_t panel, Lanes (&out)[N][VECTORS]) {
    const float *x = p.x + row * p.inputs, *weight = p.weight + panel * p.inputs * PANEL;
    Lanes sums[N][VECTORS] = {};
    for (int64_t k = 0; k < p.inputs; k++, weight += PANEL) {
        Lanes parts[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) parts[v] = load(weight + v * WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) sums[i][v] += parts[v] * x[i * p.inputs + k];
    }
    memcpy(out, sums, sizeof(sums));
}

#ifdef PAIRS
template <int N>
PAIRS static void add_up(const Product<BFloat16> &p, int64_t row, int64_t panel, Lanes (&out)[N][VECTORS]) {
    const BFloat16 *x = p.x + row * p.inputs, *weight = p.weight + panel * p.inputs * PANEL;
    __m512 sums[N][VECTORS] = {};
    for (int64_t k = 0; k < p.inputs; k += 2, weight += 2 * PANEL) {
        __m512bh parts[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) parts[v] = (__m512bh)_mm512_loadu_si512(weight + v * 2 * WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            int32_t pair;
            memcpy(&pair, x + i * p.inputs + k, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], both, parts[v]);
        }
    }
    memcpy(out, sums, sizeof(sums));
}
#endif

template <class T> struct Panels {
    INLINE Lanes finished(const Product<T> &p, int64_t row, int64_t first, Lanes sum) {
        if (p.bias) sum += load(p.bias + first);
        if (p.how == SILU) sum = sum * Gate<float>::sigmoid(sum);
        if (p.how == PLUS) sum += load(p.other + row * p.outputs + first);
        if (p.how == TIMES) sum *= load(p.other + row * p.outputs + first);
        return sum;
    }
    // The lanes of outputs that exist, each alone.
    static void write_part(const Product<T> &p, int64_t row, int64_t first, Lanes sum) {
        for (int64_t lane = 0; lane < WIDTH && first + lane < p.outputs; lane++) {
            int64_t at = first + lane;
            Lanes one = broadcast(sum[lane] + (p.bias ? to_float(p.bias[at]) : 0.0f));
            float value = p.how == SILU ? (one * Gate<float>::sigmoid(one))[0] : one[0];
            float with = p.how == PLUS || p.how == TIMES ? to_float(p.other[row * p.outputs + at]) : 0.0f;
            store_one(p.out + row * p.outputs + at, p.how == PLUS ? value + with : p.how == TIMES ? value * with : value);
        }
    }
    template <int N> static void tile(const Product<T> &p, int64_t row, int64_t panel) {
        Lanes sums[N][VECTORS];
        add_up<N>(p, row, panel, sums);
        for (int i = 0; i < N; i++)
            for (int v = 0; v < VECTORS; v++) {
                int64_t first = panel * PANEL + v * WIDTH;
                if (first + WIDTH <= p.outputs)
                    store(p.out + (row + i) * p.outputs + first, finished(p, row + i, first, sums[i][v]));
                else
                    write_part(p, row + i, first, sums[i][v]);
            }
    }
    template <int N> static void tile_of(const Product<T> &p, int64_t row, int64_t rows, int64_t panel) {
        if (rows == N) tile<N>(p, row, panel);
        else if constexpr (N > 1) tile_of<N - 1>(p, row, rows, panel);
    }
    static void run(int64_t from, int64_t to, void *self) {
        const Product<T> &p = *static_cast<Product<T> *>(self);
        for (int64_t block = 0; block < p.rows; block += ROW_BLOCK) {
            int64_t rows = block + ROW_BLOCK < p.rows ? ROW_BLOCK : p.rows - block, tiles = (rows + TILE - 1) / TILE;
            for (int64_t panel = from; panel < to; panel++)
                for (int64_t t = 0; t < tiles; t++) {  // of about equal numbers of rows: a tile of few waits for its sums
                    int64_t first = rows * t / tiles;
                    tile_of<TILE>(p, block + first, rows * (t + 1) / tiles - first, panel);
                }
        }
    }
};

extern "C" int64_t panel_outputs() { return PANEL; }

template <class T> static void run_norm(int64_t from, int64_t to, void *self) { Norm<T>::forward(from, to, self); }
template <class T> static void run_norm_backward(int64_t from, int64_t to, void *self) { Norm<T>::backward(from, to, self); }
template <class T> static void run_gate(int64_t from, int64_t to, void *self) { Gate<T>::forward(from, to, self); }
template <class T> static void run_gate_backward(int64_t from, int64_t to, void *self) { Gate<T>::backward(from, to, self); }
template <class T> static void run_attention(int64_t from, int64_t to, void *self) { Attention<T>::run_heads(from, to, self); }
template <class T> static void run_sampling(int64_t from, int64_t to, void *self) { Sampling<T>::run_rows(from, to, self); }

// The same from the nucleus: the fewest most probable tokens of mass `top_ps[row]` or more; ties go to lower ids.
struct Candidate {
    float weight;
    int32_t token;
};

template <class T> struct NucleusSampling {
    Sampling<T> sampling;
    const double *top_ps;

    // The tokens within `distance` of the largest scaled logit, in order; returns their number and adds up their mass.
    static int64_t collect(const T *x, int64_t size, const float *tops, float top, float inverse, float distance,
                           Candidate *found, double &mass) {
        int64_t count = 0;
        mass = 0;
        for (int64_t block = 0, start = 0; start < size; block++, start += TOKENS) {
            if ((top - tops[block]) * inverse > distance) continue;
            for (int64_t i = start; i < size && i < start + TOKENS; i++) {
                float below = (to_float(x[i]) - top) * inverse;
                if (!(below >= -distance)) continue;
                found[count++] = {exponential(broadcast(below))[0], int32_t(i)};
                mass += found[count - 1].weight;
            }
        }
        return count;
    }

    static void run(int64_t from, int64_t to, void *self) {
        const NucleusSampling &n = *static_cast<NucleusSampling *>(self);
        const Sampling<T> &s = n.sampling;
        int64_t size = s.vocabulary, blocks = (size + TOKENS - 1) / TOKENS;
        auto *found = static_cast<Candidate *>(malloc(size * sizeof(Candidate)));
        auto *tops = static_cast<float *>(malloc(blocks * sizeof(float)));
        for (int64_t row = from; row < to; row++) {
            const T *x = s.logits + row * size;
            float top = -INFINITY, inverse = float(1.0 / s.temperatures[row]);
            for (int64_t block = 0; block < blocks; block++) {
                int64_t i = block * TOKENS, end = (block + 1) * TOKENS < size ? (block + 1) * TOKENS : size;
                Lanes of_block = broadcast(-INFINITY);
                for (; i + WIDTH <= end; i += WIDTH) {
                    Lanes more = load(x + i);
                    of_block = more > of_block ? more : of_block;
                }
                tops[block] = largest(of_block);
                for (; i < end; i++) tops[block] = to_float(x[i]) > tops[block] ? to_float(x[i]) : tops[block];
                top = tops[block] > top ? tops[block] : top;
            }
            double total_mass = 0, mass = 0;
            for (int64_t block = 0; block < blocks; block++) {
                int64_t end = (block + 1) * TOKENS < size ? (block + 1) * TOKENS : size;
                Lanes of_block = {};
                for (int64_t i = block * TOKENS; i < end; i += WIDTH)
                    of_block += Sampling<T>::weights(x, i, end, top, inverse);
                total_mass += total(of_block);
            }
            int64_t count = 0;
            double wanted = n.top_ps[row] * total_mass;
            for (float distance = 4; std::isfinite(total_mass) && distance < 200; distance *= 2) {
                count = collect(x, size, tops, top, inverse, distance, found, mass);
                if (mass >= wanted) break;
            }
            std::sort(found, found + count, [](const Candidate &a, const Candidate &b) {
                return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
            });
            int64_t last = 0;
            mass = count ? found[0].weight : 0;
            while (last + 1 < count && found[last + 1].weight > 0 && mass < wanted) mass += found[++last].weight;
            for (int64_t draw = row ? s.ends[row - 1] : 0; draw < s.ends[row]; draw++) {
                double target = s.uniforms[draw] * mass, reached = count ? found[0].weight : 0;
                int64_t chosen = 0;
                while (chosen < last && !(reached > target)) reached += found[++chosen].weight;
                s.tokens[draw] = count ? found[chosen].token : 0;
                float logit = to_float(x[s.tokens[draw]]);
                s.logprobs[draw] = count ? float(double((logit - top) * inverse) - log(mass)) : NAN;
            }
        }
        free(tops);
        free(found);
    }
};

// Log-probabilities of targets and entropies of softmax(logits / temperature), and the gradient in place of the logits.
// `targets` are in the order of the rows, `ends[row]` of them belong to the rows up to this one.
template <class T> struct Scores {
    T *logits;
    const int64_t *targets, *ends;
    float *logprobs, *entropies, *normalizers;  // [targets], [rows], [rows, 2]: the largest logit, the logarithm of the sum
    const float *by_logprob, *by_entropy;       // of the backward: the loss's slopes; `by_entropy` may be null
    int64_t vocabulary;
    float inverse;  // 1 / temperature

    INLINE Lanes logarithms(const T *x, int64_t i, int64_t end, float top, float shift, float inverse) {
        Lanes values;
        if (i + WIDTH <= end) {
            values = (load(x + i) - top) * inverse - shift;
        } else {
            values = broadcast(-INFINITY);
            for (int64_t lane = 0; i + lane < end; lane++) values[lane] = (to_float(x[i + lane]) - top) * inverse - shift;
        }
        return values < -87.0f ? broadcast(-87.0f) : values;  // whose exponential counts as zero below
    }

    static void forward(int64_t from, int64_t to, void *self) {
        const Scores &s = *static_cast<Scores *>(self);
        for (int64_t row = from; row < to; row++) {
            const T *x = s.logits + row * s.vocabulary;
            float top = largest_of(x, s.vocabulary);
            double sum = 0, along = 0;
            for (int64_t start = 0; start < s.vocabulary; start += TOKENS) {
                int64_t end = start + TOKENS < s.vocabulary ? start + TOKENS : s.vocabulary;
                Lanes of_block = {}, along_block = {};
                for (int64_t i = start; i < end; i += WIDTH) {
                    Lanes value = logarithms(x, i, end, top, 0, s.inverse);
                    Lanes weight = value > -87.0f ? exponential(value) : value - value;
                    of_block += weight;
                    along_block += weight * value;
                }
                sum += total(of_block);
                along += total(along_block);
            }
            double log_sum = log(sum);
            s.entropies[row] = float(log_sum - along / sum);
            s.normalizers[2 * row] = top;
            s.normalizers[2 * row + 1] = float(log_sum);
            for (int64_t t = row ? s.ends[row - 1] : 0; t < s.ends[row]; t++)
                s.logprobs[t] = float(double((to_float(x[s.targets[t]]) - top) * s.inverse) - log_sum);
        }
    }

    INLINE Lanes slope(Lanes logarithm, float by_logprob, float by_entropy, float entropy) {
        Lanes weight = logarithm > -87.0f ? exponential(logarithm) : logarithm - logarithm;
        return -weight * (by_logprob + by_entropy * (logarithm + entropy));
    }

    static void backward(int64_t from, int64_t to, void *self) {
        const Scores &s = *static_cast<Scores *>(self);
        for (int64_t row = from; row < to; row++) {
            T *x = s.logits + row * s.vocabulary;
            int64_t first = row ? s.ends[row - 1] : 0, last = s.ends[row];
            float by_logprob = 0, by_entropy = s.by_entropy ? s.by_entropy[row] : 0, entropy = s.entropies[row];
            float top = s.normalizers[2 * row], shift = s.normalizers[2 * row + 1];
            for (int64_t t = first; t < last; t++) by_logprob += s.by_logprob[t];
            int64_t i = 0;
            for (; i + WIDTH <= s.vocabulary; i += WIDTH) {
                Lanes logarithm = logarithms(x, i, s.vocabulary, top, shift, s.inverse);
                store(x + i, slope(logarithm, by_logprob, by_entropy, entropy) * s.inverse);
            }
            if (i < s.vocabulary) {
                Lanes logarithm = logarithms(x, i, s.vocabulary, top, shift, s.inverse);
                Lanes rest = slope(logarithm, by_logprob, by_entropy, entropy) * s.inverse;
                for (int64_t lane = 0; i + lane < s.vocabulary; lane++) store_one(x + i + lane, rest[lane]);
            }
            for (int64_t t = first; t < last; t++) {
                Lanes logarithm = broadcast(s.logprobs[t] < -87.0f ? -87.0f : s.logprobs[t]);
                float value = slope(logarithm, by_logprob, by_entropy, entropy)[0];
                for (int64_t same = first; same < last; same++)
                    if (s.targets[same] == s.targets[t]) value += s.by_logprob[same];
                store_one(x + s.targets[t], value * s.inverse);
            }
        }
    }
};

// Products of small float matrices: out [rows, columns] = a b, or that added to it. `a` has any steps, columns are a
// multiple of 32.
constexpr int COLUMNS = WIDTH == 16 ? 4 : 2;

template <int R, int C>
static void small_tile(int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row, float *out,
                       int64_t out_row, bool add) {
    Lanes sums[R][C] = {};
    if (add)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sums[r][c] = load(out + r * out_row + c * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        Lanes parts[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) parts[c] = load(b + k * b_row + c * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) sums[r][c] += parts[c] * a[r * row + k * step];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * out_row + c * WIDTH, sums[r][c]);
}

template <int R, int C>
static void small_rows(int64_t rows, int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row,
                       float *out, int64_t out_row, bool add) {
    if (rows == R) small_tile<R, C>(depth, a, row, step, b, b_row, out, out_row, add);
    else if constexpr (R > 1) small_rows<R - 1, C>(rows, depth, a, row, step, b, b_row, out, out_row, add);
}

static void small_product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t row, int64_t step,
                          const float *b, int64_t b_row, float *out, int64_t out_row, bool add) {
    for (int64_t c = 0; c < columns;) {
        bool wide = columns - c >= COLUMNS * WIDTH;
        for (int64_t r = 0; r < rows; r += 6) {
            int64_t count = rows - r < 6 ? rows - r : 6;
            if (wide) small_rows<6, COLUMNS>(count, depth, a + r * row, row, step, b + c, b_row, out + r * out_row + c, out_row, add);
            else small_rows<6, 2>(count, depth, a + r * row, row, step, b + c, b_row, out + r * out_row + c, out_row, add);
        }
        c += (wide ? COLUMNS : 2) * WIDTH;
    }
}

// The causal attention of segments of a stream: segment s has `lengths[s]` queries from the token `starts[s]` on, and
// the keys `indices[offsets[s] .. offsets[s + 1]]`, the last of which are its own tokens. The backward computes the weights
// again. A task is a segment and a head of keys; threads take the next one, and none depends on another.
template <class T> struct SegmentAttention {
    const T *query, *keys, *values, *gradient;  // [tokens, heads, width], tokens apart by the strides; `gradient`: or null
    T *out;                                     // the outputs, or the gradient of `query`
    float *of_states;                           // [indices, 2, key_heads, width] of the backward: of each key and value
    const int64_t *starts, *lengths, *offsets, *indices;
    int64_t segments, key_heads, group, width, query_stride, key_stride, value_stride;
    float scale;
    std::atomic<int64_t> next;
    static constexpr int64_t QUERIES = 48;  // of a block

    static void run(int64_t, int64_t, void *self) {
        auto &s = *static_cast<SegmentAttention *>(self);
        for (int64_t task; (task = s.next++) < s.segments * s.key_heads;) s.attend(task / s.key_heads, task % s.key_heads);
    }

    void gather(const T *states, int64_t stride, int64_t segment, int64_t head, float *rows, float *columns,
                int64_t padded) const {
        int64_t first = offsets[segment], count = offsets[segment + 1] - first;
        for (int64_t i = 0; i < padded; i++) {
            const T *state = i < count ? states + indices[first + i] * stride + head * width : nullptr;
            for (int64_t x = 0; x < width; x += WIDTH) {
                Lanes part = state ? load(state + x) : Lanes{};
                if (rows) store(rows + i * width + x, part);
                if (columns)
                    for (int lane = 0; lane < WIDTH; lane++) columns[(x + lane) * padded + i] = part[lane];
            }
        }
    }

    // Rows of scores to weights; row r sees `first + r + 1` keys.
    static void softmax(float *scores, int64_t rows, int64_t limit, int64_t padded, int64_t first) {
        for (int64_t r = 0; r < rows; r++) {
            float *x = scores + r * padded;
            for (int64_t i = first + r + 1; i < limit; i++) x[i] = -INFINITY;
            float top = largest_of(x, limit);
            Lanes sums = {};
            for (int64_t i = 0; i < limit; i += WIDTH) {
                Lanes weight = exponential(load(x + i) - top);
                store(x + i, weight);
                sums += weight;
            }
            float inverse = 1.0f / total(sums);
            for (int64_t i = 0; i < limit; i += WIDTH) store(x + i, load(x + i) * inverse);
        }
    }

    void attend(int64_t segment, int64_t head) const {
        int64_t own = lengths[segment], first = offsets[segment], count = offsets[segment + 1] - first, context = count - own;
        int64_t padded = (count + 31) / 32 * 32, states = padded * width, heads = key_heads * group;
        auto *memory = static_cast<float *>(calloc(5 * states + QUERIES * (2 * padded + 3 * width), sizeof(float)));
        float *key_columns = memory, *value_rows = memory + states, *value_columns = value_rows, *key_rows = memory + 2 * states;
        float *of_keys = memory + 3 * states, *of_values = memory + 4 * states, *scores = memory + 5 * states;
        float *slopes = scores + QUERIES * padded, *queries = slopes + QUERIES * padded, *gradients = queries + QUERIES * width;
        float *sums = gradients + QUERIES * width;
        gather(keys, key_stride, segment, head, gradient ? key_rows : nullptr, key_columns, padded);
        gather(values, value_stride, segment, head, gradient ? nullptr : value_rows, gradient ? value_columns : nullptr, padded);
        for (int64_t of_group = 0; of_group < group; of_group++)
            for (int64_t block = 0; block < own; block += QUERIES) {
                int64_t rows = own - block < QUERIES ? own - block : QUERIES, token = starts[segment] + block;
                int64_t limit = (context + block + rows + 31) / 32 * 32, column = (head * group + of_group) * width;
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t x = 0; x < width; x += WIDTH) {
                        store(queries + r * width + x, load(query + (token + r) * query_stride + column + x) * scale);
                        if (gradient)
                            store(gradients + r * width + x, load(gradient + (token + r) * heads * width + column + x));
                    }
                small_product(rows, limit, width, queries, width, 1, key_columns, padded, scores, padded, false);
                softmax(scores, rows, limit, padded, context + block);
                const float *weights = scores;
                if (gradient) {
                    small_product(rows, limit, width, gradients, width, 1, value_columns, padded, slopes, padded, false);
                    for (int64_t r = 0; r < rows; r++) {
                        float *of_row = slopes + r * padded, *weight = scores + r * padded;
                        Lanes along = {};
                        for (int64_t i = 0; i < limit; i += WIDTH) along += load(weight + i) * load(of_row + i);
                        float mean = total(along);
                        for (int64_t i = 0; i < limit; i += WIDTH) store(of_row + i, load(weight + i) * (load(of_row + i) - mean));
                    }
                    small_product(limit, width, rows, scores, 1, padded, gradients, width, of_values, width, true);
                    small_product(limit, width, rows, slopes, 1, padded, queries, width, of_keys, width, true);
                    weights = slopes;
                }
                small_product(rows, width, limit, weights, padded, 1, gradient ? key_rows : value_rows, width, sums, width, false);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t x = 0; x < width; x += WIDTH)
                        store(out + (token + r) * heads * width + column + x,
                              load(sums + r * width + x) * (gradient ? scale : 1.0f));
            }
        for (int64_t i = 0; gradient && i < count; i++) {
            float *target = of_states + ((first + i) * 2 * key_heads + head) * width;
            memcpy(target, of_keys + i * width, width * sizeof(float));
            memcpy(target + key_heads * width, of_values + i * width, width * sizeof(float));
        }
        free(memory);
    }
};

// The gradients of keys and values: those of all segments that gathered a token are added up in their order.
template <class T> struct GatheredSum {
    const float *of_states;  // [count, 2, row]
    const int64_t *indices;
    T *of_keys, *of_values;  // [tokens, row]
    int64_t count, row;

    static void run(int64_t from, int64_t to, void *self) {
        const GatheredSum &g = *static_cast<GatheredSum *>(self);
        auto *sums = static_cast<float *>(calloc((to - from) * 2 * g.row, sizeof(float)));
        for (int64_t i = 0; i < g.count; i++) {
            if (g.indices[i] < from || g.indices[i] >= to) continue;
            float *sum = sums + (g.indices[i] - from) * 2 * g.row;
            for (int64_t x = 0; x < 2 * g.row; x += WIDTH) store(sum + x, load(sum + x) + load(g.of_states + i * 2 * g.row + x));
        }
        for (int64_t token = from; token < to; token++)
            for (int64_t x = 0; x < g.row; x += WIDTH) {
                store(g.of_keys + token * g.row + x, load(sums + (token - from) * 2 * g.row + x));
                store(g.of_values + token * g.row + x, load(sums + ((token - from) * 2 + 1) * g.row + x));
            }
        free(sums);
    }
};

// Weights `[outputs, inputs]` in panels, with zeros for inputs and outputs that do not exist.
template <class T> struct Packing {
    const T *weight;
    T *panels;
    int64_t inputs, outputs;

    static void run(int64_t from, int64_t to, void *self) {
        const Packing &p = *static_cast<Packing *>(self);
        constexpr int64_t GROUPED = sizeof(T) == 4 ? 1 : 2;
        int64_t inputs = (p.inputs + GROUPED - 1) / GROUPED * GROUPED;
        for (int64_t panel = from; panel < to; panel++) {
            T *target = p.panels + panel * inputs * PANEL;
            for (int64_t k = 0; k < inputs; k += GROUPED)
                for (int64_t out = 0; out < PANEL; out++)
                    for (int64_t g = 0; g < GROUPED; g++) {
                        int64_t row = panel * PANEL + out;
                        *target++ = row < p.outputs && k + g < p.inputs ? p.weight[row * p.inputs + k + g] : T{};
                    }
        }
    }
};

// The decoder layers of a decode step, one after another, on hidden states that they change in place.
template <class T> struct Layer {
    const T *attention_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias;
    const T *mlp_norm, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    T *keys, *values;  // [rows, key_heads, capacity, width]
    const T *const *prompt_keys, *const *prompt_values;
};

struct Step {
    const int64_t *positions, *first, *split, *lengths, *prompt_of, *prompt_lengths;
    int64_t rows, hidden, inner, query_heads, key_heads, width, capacity;
    float epsilon, scale;
};

// Rotate the queries and keys of rows, and write their keys and values to the cache.
template <class T> struct Rotation {
    const Step *step;
    const Layer<T> *layer;
    T *heads;
    const T *cosines, *sines;

    static void run(int64_t from, int64_t to, void *self) {
        const Rotation &r = *static_cast<Rotation *>(self);
        const Step &s = *r.step;
        int64_t count = s.query_heads + 2 * s.key_heads, row_of_cache = s.key_heads * s.capacity * s.width;
        for (int64_t row = from; row < to; row++) {
            T *heads = r.heads + row * count * s.width;
            rotate_rows(heads, r.cosines + row * s.width, r.sines + row * s.width, r.layer->query_norm, r.layer->key_norm, 1,
                        1, s.query_heads, s.key_heads, count, s.width, s.epsilon);
            store_rows(heads + s.query_heads * s.width, r.layer->keys + row * row_of_cache,
                       r.layer->values + row * row_of_cache, s.positions + row, 1, 0, s.key_heads, s.width, s.capacity);
        }
    }
};

template <class T> static void run_norm(int64_t, int64_t, void *);
template <class T> static void run_attention(int64_t, int64_t, void *);

template <class T>
static void decode(ParallelFor run, const Step &s, const Layer<T> *layers, int64_t num_layers, T *hidden, T *buffer,
                   const T *cosines, const T *sines, float *scales) {
    int64_t count = s.query_heads + 2 * s.key_heads, attended = s.query_heads * s.width;
    T *normed = buffer, *heads = normed + s.rows * s.hidden, *outputs = heads + s.rows * count * s.width;
    T *gated = outputs + s.rows * attended;
    auto norm = [&](const T *weight) {
        Norm<T> all = {hidden, weight, nullptr, normed, scales, nullptr, s.rows, s.hidden, s.epsilon};
        run(0, s.rows, 16, run_norm<T>, &all);
    };
    auto product = [&](const T *x, const T *weight, const T *bias, T *out, int64_t inputs, int64_t num, int64_t how,
                       const T *other) {
        Product<T> all = {x, weight, bias, other, out, s.rows, inputs, num, how};
        run(0, (num + PANEL - 1) / PANEL, 1, Panels<T>::run, &all);
    };
    for (const Layer<T> *layer = layers; layer < layers + num_layers; layer++) {
        norm(layer->attention_norm);
        product(normed, layer->qkv, layer->qkv_bias, heads, s.hidden, count * s.width, PLAIN, nullptr);
        Rotation<T> rotation = {&s, layer, heads, cosines, sines};
        run(0, s.rows, 8, Rotation<T>::run, &rotation);
        Attention<T> attention = {heads, layer->keys, layer->values, outputs, s.first, s.split, s.lengths, s.prompt_of,
                                  s.prompt_lengths, layer->prompt_keys, layer->prompt_values, s.rows, count * s.width,
                                  s.key_heads, s.query_heads / s.key_heads, s.width, s.capacity, s.scale};
        run(0, s.rows * s.key_heads, 4, run_attention<T>, &attention);
        product(outputs, layer->output, layer->output_bias, hidden, attended, s.hidden, PLUS, hidden);
        norm(layer->mlp_norm);
        product(normed, layer->gate, layer->gate_bias, gated, s.hidden, s.inner, SILU, nullptr);
        product(normed, layer->up, layer->up_bias, gated, s.hidden, s.inner, TIMES, gated);
        product(gated, layer->down, layer->down_bias, hidden, s.inner, s.hidden, PLUS, hidden);
    }
}

#define PRODUCTS(T, SUFFIX)                                                                                           \
    extern "C" void product_##SUFFIX(ParallelFor run, const T *x, const T *weight, const T *bias, const T *other,     \
                                     T *out, int64_t rows, int64_t inputs, int64_t outputs, int64_t how) {            \
        Product<T> all = {x, weight, bias, other, out, rows, inputs, outputs, how};                                   \
        run(0, (outputs + PANEL - 1) / PANEL, 1, Panels<T>::run, &all);                                               \
    }                                                                                                                 \
    extern "C" void pack_##SUFFIX(ParallelFor run, const T *weight, T *panels, int64_t outputs, int64_t inputs) {     \
        Packing<T> all = {weight, panels, inputs, outputs};                                                           \
        run(0, (outputs + PANEL - 1) / PANEL, 1, Packing<T>::run, &all);                                              \
    }                                                                                                                 \
    extern "C" void decode_##SUFFIX(ParallelFor run, T *hidden, const Layer<T> *layers, T *buffer, const T *cosines,  \
                                    const T *sines, float *scales, const int64_t *positions, const int64_t *first,    \
                                    const int64_t *split, const int64_t *lengths, const int64_t *prompt_of,           \
                                    const int64_t *prompt_lengths, int64_t num_layers, int64_t rows, int64_t width,   \
                                    int64_t inner, int64_t query_heads, int64_t key_heads, int64_t head,              \
                                    int64_t capacity, float epsilon, float scale) {                                   \
        Step step = {positions, first, split,       lengths,   prompt_of, prompt_lengths, rows, width,                \
                     inner,     query_heads, key_heads, head,  capacity,  epsilon,        scale};                     \
        decode(run, step, layers, num_layers, hidden, buffer, cosines, sines, scales);                                \
    }

PRODUCTS(float, float32)
#ifdef PAIRS
PRODUCTS(BFloat16, bfloat16)
extern "C" int64_t multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
#else
extern "C" int64_t multiplies_bfloat16() { return 0; }
#endif

#define EXPORTS(T, SUFFIX)                                                                                            \
    extern "C" void norm_forward_##SUFFIX(ParallelFor run, const T *x, const T *weight, T *out, float *scales,        \
                                          int64_t rows, int64_t width, float epsilon) {                               \
        Norm<T> all = {x, weight, nullptr, out, scales, nullptr, rows, width, epsilon};                               \
        run(0, rows, 64, run_norm<T>, &all);                                                                          \
    }                                                                                                                 \
    extern "C" void norm_backward_##SUFFIX(ParallelFor run, const T *x, const T *weight, const T *gradient, T *out,   \
                                           float *scales, float *sums, int64_t rows, int64_t width) {                 \
        Norm<T> all = {x, weight, gradient, out, scales, sums, rows, width, 0};                                       \
        run(0, (rows + ROWS - 1) / ROWS, 1, run_norm_backward<T>, &all);                                              \
    }                                                                                                                 \
    extern "C" void gate_forward_##SUFFIX(ParallelFor run, const T *gate, const T *up, T *out, int64_t count) {       \
        Gate<T> all = {gate, up, nullptr, out, nullptr};                                                              \
        run(0, count / WIDTH, 4096, run_gate<T>, &all);                                                               \
    }                                                                                                                 \
    extern "C" void gate_backward_##SUFFIX(ParallelFor run, const T *gate, const T *up, const T *gradient, T *out,    \
                                           T *of_up, int64_t count) {                                                 \
        Gate<T> all = {gate, up, gradient, out, of_up};                                                               \
        run(0, count / WIDTH, 4096, run_gate_backward<T>, &all);                                                      \
    }                                                                                                                 \
    extern "C" void add_##SUFFIX(ParallelFor run, const T *values, float *sums, int64_t count) {                      \
        Addition<T> all = {values, sums};                                                                             \
        run(0, count, 1 << 15, Addition<T>::run, &all);                                                               \
    }                                                                                                                 \
    extern "C" void rotate_##SUFFIX(T *rows, const T *cosines, const T *sines, const T *query_weight,                 \
                                    const T *key_weight, int64_t num_rows, int64_t angle_rows, int64_t query_heads,   \
                                    int64_t key_heads, int64_t heads_of_row, int64_t width, float epsilon) {          \
        rotate_rows(rows, cosines, sines, query_weight, key_weight, num_rows, angle_rows, query_heads, key_heads,     \
                    heads_of_row, width, epsilon);                                                                    \
    }                                                                                                                 \
    extern "C" void store_positions_##SUFFIX(const T *states, T *keys, T *values, const int64_t *positions,           \
                                             int64_t rows, int64_t row_stride, int64_t heads, int64_t width,          \
                                             int64_t capacity) {                                                      \
        store_rows(states, keys, values, positions, rows, row_stride, heads, width, capacity);                        \
    }                                                                                                                 \
    extern "C" void attention_##SUFFIX(ParallelFor run, const T *query, const T *keys, const T *values, T *out,       \
                                       const int64_t *first, const int64_t *split, const int64_t *lengths,            \
                                       const int64_t *prompt_of,                                                      \
                                       const int64_t *prompt_lengths, const T *const *prompt_keys,                    \
                                       const T *const *prompt_values, int64_t rows, int64_t row_stride,               \
                                       int64_t key_heads, int64_t group, int64_t width, int64_t capacity,             \
                                       float scale) {                                                                 \
        Attention<T> all = {query,       keys,          values, out,        first,     split, lengths, prompt_of, prompt_lengths, \
                            prompt_keys, prompt_values, rows,   row_stride, key_heads, group,   width,     capacity,  \
                            scale};                                                                                   \
        run(0, rows *key_heads, 4, run_attention<T>, &all);                                                           \
    }                                                                                                                 \
    extern "C" void sample_##SUFFIX(ParallelFor run, const T *logits, const double *temperatures,                     \
                                    const double *uniforms, const int64_t *ends, int64_t *tokens, float *logprobs,    \
                                    double *sums, int64_t rows, int64_t vocabulary) {                                 \
        Sampling<T> all = {logits, temperatures, uniforms, ends, tokens, logprobs, sums, vocabulary};                 \
        run(0, rows, 1, run_sampling<T>, &all);                                                                       \
    }                                                                                                                 \
    extern "C" void score_forward_##SUFFIX(ParallelFor run, T *logits, const int64_t *targets, const int64_t *ends,   \
                                           float *logprobs, float *entropies, float *normalizers, int64_t rows,       \
                                           int64_t vocabulary, float inverse) {                                       \
        Scores<T> all = {logits, targets, ends, logprobs, entropies, normalizers, nullptr, nullptr, vocabulary, inverse}; \
        run(0, rows, 1, Scores<T>::forward, &all);                                                                    \
    }                                                                                                                 \
    extern "C" void score_backward_##SUFFIX(ParallelFor run, T *logits, const int64_t *targets, const int64_t *ends,  \
                                            float *logprobs, float *entropies, float *normalizers,                    \
                                            const float *by_logprob, const float *by_entropy, int64_t rows,           \
                                            int64_t vocabulary, float inverse) {                                      \
        Scores<T> all = {logits,     targets,    ends,       logprobs, entropies, normalizers,                        \
                         by_logprob, by_entropy, vocabulary, inverse};                                                \
        run(0, rows, 1, Scores<T>::backward, &all);                                                                   \
    }                                                                                                                 \
    extern "C" void segments_##SUFFIX(ParallelFor run, const T *query, const T *keys, const T *values,                \
                                      const T *gradient, T *out, T *of_keys, T *of_values, float *of_states,          \
                                      const int64_t *starts, const int64_t *lengths, const int64_t *offsets,          \
                                      const int64_t *indices, int64_t segments, int64_t key_heads, int64_t group,     \
                                      int64_t width, int64_t query_stride, int64_t key_stride, int64_t value_stride,  \
                                      int64_t tokens, float scale) {                                                  \
        SegmentAttention<T> all = {query,   keys,     values,    gradient, out,   of_states,    starts,     lengths,      offsets, \
                                   indices, segments, key_heads, group,    width, query_stride, key_stride, value_stride, scale,   \
                                   {0}};                                                                              \
        run(0, segments *key_heads, 1, SegmentAttention<T>::run, &all);                                               \
        if (!gradient) return;                                                                                        \
        GatheredSum<T> sum = {of_states, indices, of_keys, of_values, offsets[segments], key_heads * width};          \
        run(0, tokens, 16, GatheredSum<T>::run, &sum);                                                                \
    }                                                                                                                 \
    extern "C" void sample_nucleus_##SUFFIX(ParallelFor run, const T *logits, const double *temperatures,             \
                                            const double *top_ps, const double *uniforms, const int64_t *ends,        \
                                            int64_t *tokens, float *logprobs, int64_t rows, int64_t vocabulary) {     \
        NucleusSampling<T> all = {{logits, temperatures, uniforms, ends, tokens, logprobs, nullptr, vocabulary}, top_ps}; \
        run(0, rows, 1, NucleusSampling<T>::run, &all);                                                               \
    }

EXPORTS(float, float32)
EXPORTS(BFloat16, bfloat16)
