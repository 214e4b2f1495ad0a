// Kernels of a decoder step for which torch has no single operation, for float and bfloat16, on the CPU.
//
// Sums are computed in float, and results are rounded once. Every row is computed separately and in one order, so a result
// does not depend on the other rows of the batch. Pointers are to contiguous memory; strides and sizes count elements. The
// Python side (dovetail/ops/cpu/kernels.py) documents each argument and checks it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#include <optional>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Returns e^x to 2 units in the last place, 0 below the smallest normal number. Written so that compilers vectorise it: Cody and
// Waite's reduction, then the polynomial of Cephes' expf.
inline float exponential(float x) {
    float clamped = std::min(std::max(x, -87.3f), 88.3f);
    float n = std::floor(clamped * 1.44269504088896341f + 0.5f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return x < -87.3f ? 0.0f : p * scale;
}

using Lanes = float __attribute__((vector_size(64)));

inline Lanes lanes(const float* from) {
    Lanes out;
    std::memcpy(&out, from, 64);
    return out;
}

// Keeps x in a register; otherwise the compiler reads it from memory again for each use.
inline void hold(Lanes& x) {
#ifdef __AVX512F__
    asm("" : "+v"(x));
#else
    (void)x;
#endif
}

inline float lane_sum(Lanes x) {  // in halves; otherwise the compiler adds one lane after the other
    using Half = float __attribute__((vector_size(32)));
    using Quarter = float __attribute__((vector_size(16)));
    Half a[2];
    std::memcpy(a, &x, 64);
    a[0] += a[1];
    Quarter b[2];
    std::memcpy(b, a, 32);
    b[0] += b[1];
    return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}

// Returns lane_sum of each, in the same order.
template <int N>
void lane_sums(const Lanes* x, float* out) {
    if constexpr (N == 4) {
        using Half = float __attribute__((vector_size(32)));
        using Quarter = float __attribute__((vector_size(16)));
        Quarter quarters[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            Half halves[2];
            std::memcpy(halves, x + i, 64);
            halves[0] += halves[1];
            Quarter parts[2];
            std::memcpy(parts, halves, 32);
            quarters[i] = parts[0] + parts[1];
        }
        const Quarter a = __builtin_shufflevector(quarters[0], quarters[1], 0, 1, 4, 5) +
                          __builtin_shufflevector(quarters[0], quarters[1], 2, 3, 6, 7);
        const Quarter b = __builtin_shufflevector(quarters[2], quarters[3], 0, 1, 4, 5) +
                          __builtin_shufflevector(quarters[2], quarters[3], 2, 3, 6, 7);
        const Quarter sums = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
        std::memcpy(out, &sums, 16);
    } else {
        for (int i = 0; i < N; ++i) out[i] = lane_sum(x[i]);
    }
}

// Holds 32 elements as floats, in an order that is cheap to produce: unchanged, or for bfloat16 the even elements first.
struct Pair {
    Lanes first, second;
};
inline Pair pair(const float* from) { return {lanes(from), lanes(from + 16)}; }
inline Pair pair(const bf16* from) {
    using Words = uint32_t __attribute__((vector_size(64)));
    Words words;
    std::memcpy(&words, from, 64);
    const Words even = words << 16, odd = words & 0xffff0000;
    Pair out;
    std::memcpy(&out.first, &even, 64);
    std::memcpy(&out.second, &odd, 64);
    return out;
}

constexpr int64_t kAhead = 4096;  // bytes; the processor's own prefetching stops at page boundaries
constexpr int64_t kSerial = 16384;  // elements below which handing work to threads costs more than it saves

template <typename T, typename W>
void rms_norm(T* x, const T* residual, const W* weight, T* out, int64_t rows, int64_t heads, int64_t stride, int64_t d,
              float eps) {
#pragma omp parallel for if (rows * d > kSerial) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        T* from = x + (r / heads) * stride + (r % heads) * d;
        const W* w = weight + (r % heads) * d;
        T* to = out + r * d;
        float sum = 0.0f;
        if (residual != nullptr) {
            const T* add = residual + r * d;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < d; ++i) {
                put(from + i, wide(from[i]) + wide(add[i]));
                float value = wide(from[i]);
                sum += value * value;
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < d; ++i) {
                float value = wide(from[i]);
                sum += value * value;
            }
        }
        float factor = 1.0f / std::sqrt(sum / static_cast<float>(d) + eps);
#pragma omp simd
        for (int64_t i = 0; i < d; ++i) put(to + i, wide(from[i]) * factor * wide(w[i]));
    }
}

template <typename T>
void rotary(const T* x, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads, int64_t stride, int64_t d,
            int64_t angle_stride) {
    const int64_t half = d / 2;
#pragma omp parallel for if (tokens * heads * d > kSerial) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const T* c = cos + t * angle_stride;
        const T* s = sin + t * angle_stride;
        for (int64_t h = 0; h < heads; ++h) {
            const T* from = x + t * stride + h * d;
            T* to = out + (t * heads + h) * d;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                float a = wide(from[i]), b = wide(from[i + half]);
                put(to + i, a * wide(c[i]) + b * wide(s[i]));
                put(to + i + half, b * wide(c[i + half]) + a * wide(s[i + half]));
            }
        }
    }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n > kSerial) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * 2 * n;
        const T* up = gate + n;
        T* to = out + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float g = wide(gate[i]);
            put(to + i, g / (1.0f + exponential(-g)) * wide(up[i]));
        }
    }
}

// The approximation of GELU by tanh: x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T>
void gelu_tanh_mul(const T* gate_up, T* out, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n > kSerial) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * 2 * n;
        const T* up = gate + n;
        T* to = out + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float g = wide(gate[i]);
            float u = 1.5957691216057308f * (g + 0.044715f * g * g * g);
            put(to + i, g / (1.0f + exponential(-u)) * wide(up[i]));
        }
    }
}

constexpr int kRows = 4;    // rows of a weight that are in registers at once
constexpr int kInputs = 6;  // inputs multiplied with these rows; with their sums they use all registers

// Computes the products of R rows of a weight and M inputs of d floats each; the first `whole` floats are in the order of
// pair. The order of a sum and its roundings do not depend on R and M.
template <int R, int M, typename T>
__attribute__((noinline)) void tile_product(const T* rows, const float* x, int64_t whole, int64_t d, float out[kInputs][kRows]) {
    Lanes sums[M][R] = {};
    for (int64_t i = 0; i < whole; i += 32) {
        Lanes first[R], second[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const T* from = rows + r * d + i;
            const Pair both = pair(from);
            first[r] = both.first, second[r] = both.second;
            hold(first[r]);
            __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead);
            if (sizeof(T) == 4) __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead + 64);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            Lanes input = lanes(x + m * d + i);
            hold(input);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[m][r] += first[r] * input;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) hold(second[r]);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            Lanes input = lanes(x + m * d + i + 16);
            hold(input);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[m][r] += second[r] * input;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        lane_sums<R>(sums[m], out[m]);
        for (int64_t i = whole; i < d; ++i)
            for (int r = 0; r < R; ++r) out[m][r] = std::fma(wide(rows[r * d + i]), x[m * d + i], out[m][r]);
    }
}

template <int R, typename T>
void tile_product(const T* rows, const float* x, int inputs, int64_t whole, int64_t d, float out[kInputs][kRows]) {
    switch (inputs) {
        case 1: return tile_product<R, 1>(rows, x, whole, d, out);
        case 2: return tile_product<R, 2>(rows, x, whole, d, out);
        case 3: return tile_product<R, 3>(rows, x, whole, d, out);
        case 4: return tile_product<R, 4>(rows, x, whole, d, out);
        case 5: return tile_product<R, 5>(rows, x, whole, d, out);
        default: return tile_product<R, kInputs>(rows, x, whole, d, out);
    }
}

// Computes out [m, n] = x [m, d] @ weight [n, d].T + bias [n] for few m. The weight is read from memory once and in order,
// which takes most of the time.
template <typename T>
void product(const T* weight, const T* x, const T* bias, T* out, int64_t m, int64_t n, int64_t d) {
    const int64_t whole = d / 32 * 32, parts = (m + kInputs - 1) / kInputs;
    std::vector<float> input(m * d);
    for (int64_t row = 0; row < m; ++row) {
        const T* from = x + row * d;
        float* to = input.data() + row * d;
        for (int64_t i = 0; i < whole; i += 32) {
            const Pair ordered = pair(from + i);
            std::memcpy(to + i, &ordered, 128);
        }
        for (int64_t i = whole; i < d; ++i) to[i] = wide(from[i]);
    }
#pragma omp parallel for if (n * d > 2 * kSerial) schedule(static)
    for (int64_t row = 0; row < n; row += kRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kRows, n - row));
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = part * m / parts, end = (part + 1) * m / parts;
            const int count = static_cast<int>(end - first);
            float sums[kInputs][kRows];
            if (rows == kRows)
                tile_product<kRows>(weight + row * d, input.data() + first * d, count, whole, d, sums);
            else
                for (int r = 0; r < rows; ++r) {
                    float one[kInputs][kRows];
                    tile_product<1>(weight + (row + r) * d, input.data() + first * d, count, whole, d, one);
                    for (int i = 0; i < count; ++i) sums[i][r] = one[i][0];
                }
            for (int i = 0; i < count; ++i)
                for (int r = 0; r < rows; ++r)
                    put(out + (first + i) * n + row + r, bias == nullptr ? sums[i][r] : sums[i][r] + wide(bias[row + r]));
        }
    }
}

// Codes of MXFP4 weights (dovetail/ops/mxfp4.py): of a block of 32 columns, the low bits of 16 bytes are the first 16 columns,
// the high bits the others. A code is an index of `kFourBits`.
constexpr float kFourBits[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Block {
    Lanes first, second;  // the columns of a block, without their scale
};

inline Block block_of(const uint8_t* codes) {
    using Bytes = uint8_t __attribute__((vector_size(16)));
    using Indices = int32_t __attribute__((vector_size(64)));
    Bytes both;
    std::memcpy(&both, codes, 16);
    const Lanes values = lanes(kFourBits);
    return {__builtin_shuffle(values, __builtin_convertvector(both & 15, Indices)),
            __builtin_shuffle(values, __builtin_convertvector(both >> 4, Indices))};
}

inline float power_of(uint8_t scale) {  // 2 to the power of scale - 127
    const uint32_t bits = scale == 0 ? 1u << 22 : static_cast<uint32_t>(scale) << 23;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Computes the products of R rows of codes and M inputs of d floats each. `scales` are those of the rows in the first block;
// those of the next block follow after n. The order of a sum does not depend on R and M.
template <int R, int M>
__attribute__((noinline)) void mxfp4_tile(const uint8_t* codes, const uint8_t* scales, const float* x, int64_t n, int64_t d,
                                          float out[kInputs][kRows]) {
    Lanes sums[M][R] = {};
    for (int64_t i = 0; i < d; i += 32) {
        Lanes first[R], second[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const uint8_t* from = codes + (r * d + i) / 2;
            const Block block = block_of(from);
            const float scale = power_of(scales[i / 32 * n + r]);
            first[r] = block.first * scale, second[r] = block.second * scale;
            __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead / 4);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Lanes low = lanes(x + m * d + i), high = lanes(x + m * d + i + 16);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[m][r] += first[r] * low;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[m][r] += second[r] * high;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) lane_sums<R>(sums[m], out[m]);
}

template <int R>
void mxfp4_tile(const uint8_t* codes, const uint8_t* scales, const float* x, int inputs, int64_t n, int64_t d,
                float out[kInputs][kRows]) {
    switch (inputs) {
        case 1: return mxfp4_tile<R, 1>(codes, scales, x, n, d, out);
        case 2: return mxfp4_tile<R, 2>(codes, scales, x, n, d, out);
        case 3: return mxfp4_tile<R, 3>(codes, scales, x, n, d, out);
        case 4: return mxfp4_tile<R, 4>(codes, scales, x, n, d, out);
        case 5: return mxfp4_tile<R, 5>(codes, scales, x, n, d, out);
        default: return mxfp4_tile<R, kInputs>(codes, scales, x, n, d, out);
    }
}

// Computes out [m, n] = x [m, d] @ weight [n, d].T + bias [n] for few m, of codes [n, d / 2] and scales [d / 32, n].
template <typename T>
void mxfp4_product(const uint8_t* codes, const uint8_t* scales, const T* x, const T* bias, T* out, int64_t m, int64_t n, int64_t d) {
    const int64_t parts = (m + kInputs - 1) / kInputs;
    std::vector<float> input(m * d);
    for (int64_t i = 0; i < m * d; ++i) input[i] = wide(x[i]);
#pragma omp parallel for if (n * d > 2 * kSerial) schedule(static)
    for (int64_t row = 0; row < n; row += kRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kRows, n - row));
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = part * m / parts, end = (part + 1) * m / parts;
            const int count = static_cast<int>(end - first);
            float sums[kInputs][kRows];
            if (rows == kRows)
                mxfp4_tile<kRows>(codes + row * d / 2, scales + row, input.data() + first * d, count, n, d, sums);
            else
                for (int r = 0; r < rows; ++r) {
                    float one[kInputs][kRows];
                    mxfp4_tile<1>(codes + (row + r) * d / 2, scales + row + r, input.data() + first * d, count, n, d, one);
                    for (int i = 0; i < count; ++i) sums[i][r] = one[i][0];
                }
            for (int i = 0; i < count; ++i)
                for (int r = 0; r < rows; ++r)
                    put(out + (first + i) * n + row + r, bias == nullptr ? sums[i][r] : sums[i][r] + wide(bias[row + r]));
        }
    }
}

// Writes the weight [n, d] of codes [n, d / 2] and scales [d / 32, n].
template <typename T>
void mxfp4_weight(const uint8_t* codes, const uint8_t* scales, T* out, int64_t n, int64_t d) {
#pragma omp parallel for if (n * d > 2 * kSerial) schedule(static)
    for (int64_t row = 0; row < n; ++row)
        for (int64_t i = 0; i < d; i += 32) {
            const Block block = block_of(codes + (row * d + i) / 2);
            const float scale = power_of(scales[i / 32 * n + row]);
            const Lanes first = block.first * scale, second = block.second * scale;
            T* to = out + row * d + i;
            for (int j = 0; j < 16; ++j) put(to + j, first[j]);
            for (int j = 0; j < 16; ++j) put(to + 16 + j, second[j]);
        }
}

// Copies row t of k and v to location out_loc[t] of the pool.
template <typename T>
void store(const T* k, const T* v, T* keys, T* values, const int64_t* out_loc, int64_t tokens, int64_t k_stride,
           int64_t v_stride, int64_t width) {
#pragma omp parallel for if (tokens * width > kSerial) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(keys + out_loc[t] * width, k + t * k_stride, width * sizeof(T));
        std::memcpy(values + out_loc[t] * width, v + t * v_stride, width * sizeof(T));
    }
}

// A span's row of the page table, the index of its first query, its number of queries, and the position of the first.
struct Span {
    int64_t row, first, queries, position;
};

struct Attention {
    const int32_t* page_table;  // [rows, table_stride]
    const float* sinks;         // [heads] or null
    int64_t q_stride, table_stride, page_size, heads, kv_heads, d;
    int64_t window;  // 0: none
    float scale, soft_cap;  // soft_cap 0: none
};

constexpr int kBlock = 64;      // keys whose scores are held at once
constexpr float kHidden = -1e30f;  // the score of a key that a row does not see; finite, so that no difference is NaN

// Returns the index at which pair puts element i of a row whose size D is known at compile time. If D = 0, rows stay in order.
template <int D, typename T>
int64_t ordered(int64_t i) {
    return D > 0 && sizeof(T) == 2 ? i / 32 * 32 + i % 2 * 16 + i % 32 / 2 : i;
}

// Returns the product of a and b. a is in the order of `ordered`.
template <int D, typename T>
float dot(const float* a, const T* b, int64_t d) {
    if constexpr (D > 0) {
        Lanes first = {}, second = {};
#pragma GCC unroll 16
        for (int i = 0; i < D; i += 32) {
            const Pair row = pair(b + i);
            first += lanes(a + i) * row.first;
            second += lanes(a + i + 16) * row.second;
        }
        return lane_sum(first + second);
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < d; ++i) sum += a[i] * wide(b[i]);
    return sum;
}

// Computes to = to * shrink + the sum over j of weights[j] * (base + places[j]), in the order of `ordered`.
template <int D, typename T>
void add_weighted(float* to, float shrink, const float* weights, const T* base, const int64_t* places, int count, int64_t d) {
    if constexpr (D > 0) {
        Lanes sum[D / 16];
#pragma GCC unroll 16
        for (int i = 0; i < D; i += 16) sum[i / 16] = lanes(to + i) * shrink;
        for (int j = 0; j < count; ++j)
#pragma GCC unroll 16
            for (int i = 0; i < D; i += 32) {
                const Pair row = pair(base + places[j] + i);
                sum[i / 16] += row.first * weights[j];
                sum[i / 16 + 1] += row.second * weights[j];
            }
        std::memcpy(to, sum, sizeof(sum));
        return;
    }
    for (int64_t i = 0; i < d; ++i) to[i] *= shrink;
    for (int j = 0; j < count; ++j)
#pragma omp simd
        for (int64_t i = 0; i < d; ++i) to[i] += weights[j] * wide(base[places[j] + i]);
}

// Writes to `places` the offsets in the pool of one head's keys, for the block that starts at begin. Returns their number.
inline int places_of(const Attention& a, const int32_t* pages, int64_t kv_head, int64_t begin, int64_t end, int64_t* places) {
    const int64_t step = a.kv_heads * a.d;
    const int count = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(kBlock, end - begin)));
    for (int j = 0; j < count;) {  // page by page
        const int64_t page = (begin + j) / a.page_size, offset = begin + j - page * a.page_size;
        const int stop = static_cast<int>(std::min<int64_t>(count, j + a.page_size - offset));
        int64_t place = (pages[page] * a.page_size + offset) * step + kv_head * a.d;
        for (; j < stop; ++j, place += step) places[j] = place;
    }
    return count;
}

// Prefetches rows before their use. They are too far apart for the processor's own prefetching.
template <typename T>
void fetch(const T* base, const int64_t* places, int count, int64_t d) {
    for (int j = 0; j < count; ++j) {
        const char* row = reinterpret_cast<const char*>(base + places[j]);
        for (int64_t byte = 0; byte < d * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
    }
}

// Computes attention of one query, for the query heads of `kv_count` key heads from kv_first on, to which q and out point:
// softmax over blocks of keys with a running maximum, as in FlashAttention (arXiv 2205.14135). D is head_dim if it is known
// at compile time and a multiple of 32, else 0.
template <typename T, int D>
void attend_query(const Attention& a, const T* q, const T* keys, const T* values, const int32_t* pages, int64_t kv_first,
                  int64_t kv_count, int64_t begin, int64_t end, float* memory, T* out) {
    const int64_t d = D ? D : a.d, folds = a.heads / a.kv_heads, heads = kv_count * folds;
    float* query = memory;             // [heads, d]
    float* sum = query + heads * d;    // [heads, d]
    float* top = sum + heads * d;      // [heads]
    float* total = top + heads;        // [heads]
    float scores[kBlock];
    std::fill(sum, sum + heads * d, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < d; ++i) query[h * d + ordered<D, T>(i)] = wide(q[h * d + i]) * a.scale;
        top[h] = -std::numeric_limits<float>::infinity();
        total[h] = 0.0f;
    }
    int64_t places[kBlock], following[kBlock];
    int count = places_of(a, pages, kv_first, begin, end, following);
    for (int64_t block = begin; block < end; block += kBlock) {
        const int now = count;
        std::copy(following, following + now, places);
        count = places_of(a, pages, kv_first, block + kBlock, end, following);
        fetch(values, places, now, kv_count * d);
        fetch(keys, following, count, kv_count * d);
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t offset = h / folds * d;
            for (int j = 0; j < now; ++j) scores[j] = dot<D>(query + h * d, keys + places[j] + offset, d);
            if (a.soft_cap > 0.0f)
                for (int j = 0; j < now; ++j) scores[j] = a.soft_cap * std::tanh(scores[j] / a.soft_cap);
            float best = top[h];
            for (int j = 0; j < now; ++j) best = std::max(best, scores[j]);
            const float shrink = exponential(top[h] - best);
            float block_total = 0.0f;
#pragma omp simd reduction(+ : block_total)
            for (int j = 0; j < now; ++j) {
                scores[j] = exponential(scores[j] - best);
                block_total += scores[j];
            }
            top[h] = best;
            total[h] = total[h] * shrink + block_total;
            add_weighted<D>(sum + h * d, shrink, scores, values + offset, places, now, d);
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
        float factor = 1.0f, all = total[h];
        if (a.sinks != nullptr) {
            const float sink = a.sinks[kv_first * folds + h], best = std::max(top[h], sink);
            factor = exponential(top[h] - best);
            all = all * factor + exponential(sink - best);
        }
        factor /= all;
        for (int64_t i = 0; i < d; ++i) put(out + h * d + i, sum[h * d + ordered<D, T>(i)] * factor);
    }
}

constexpr int kLanes = 64;  // rows of a tile: query heads of one key head, of consecutive queries

// Computes c [rows, kLanes] (+)= a [rows, depth] @ b [depth, kLanes] for the first V * 16 lanes. Element (r, k) of a is
// a[r * row_step + k * k_step].
template <int V, int R>
void multiply_tile(const float* a, int64_t row_step, int64_t k_step, const float* b, int64_t depth, float* c, bool add) {
    Lanes sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = add ? lanes(c + r * kLanes + v * 16) : Lanes{};
    for (int64_t k = 0; k < depth; ++k) {
        Lanes row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) row[v] = lanes(b + k * kLanes + v * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const float factor = a[r * row_step + k * k_step];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += row[v] * factor;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) std::memcpy(c + r * kLanes, sums[r], sizeof(sums[r]));
}

template <int V>
void multiply(const float* a, int64_t rows, int64_t row_step, int64_t k_step, const float* b, int64_t depth, float* c, bool add) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) multiply_tile<V, 6>(a + r * row_step, row_step, k_step, b, depth, c + r * kLanes, add);
    for (; r + 2 <= rows; r += 2) multiply_tile<V, 2>(a + r * row_step, row_step, k_step, b, depth, c + r * kLanes, add);
    for (; r < rows; ++r) multiply_tile<V, 1>(a + r * row_step, row_step, k_step, b, depth, c + r * kLanes, add);
}

// Holds the memory of a tile. Its rows are the last dimension of everything, so that nothing is summed across lanes.
struct Tile {
    std::vector<float> query, sum, scores, rows;  // [d, kLanes], [d, kLanes], [kBlock, kLanes]; keys or values [kBlock, d]
    explicit Tile(int64_t d) : query(d * kLanes), sum(d * kLanes), scores(kBlock * kLanes), rows(kBlock * d) {}
};

template <typename T>
void read_rows(const Attention& a, const T* from, const int32_t* pages, int64_t kv_head, int64_t begin, int count, float* to) {
    const int64_t step = a.kv_heads * a.d;
    for (int j = 0; j < count; ++j) {
        const int64_t token = begin + j, page = token / a.page_size;
        const T* row = from + (pages[page] * a.page_size + token - page * a.page_size) * step + kv_head * a.d;
#pragma omp simd
        for (int64_t i = 0; i < a.d; ++i) to[j * a.d + i] = wide(row[i]);
    }
}

// Computes attention of `count` consecutive queries, the first at `position` of its row, with all query heads of one key
// head. They fill V * 16 lanes.
template <int V, typename T>
void attend_lanes(const Attention& a, const T* q, const T* keys, const T* values, const int32_t* pages, int64_t kv_head,
                 int64_t position, int count, Tile& tile, T* out) {
    const int64_t d = a.d, folds = a.heads / a.kv_heads, width = a.heads * d;
    constexpr int kUsed = V * 16;
    const int used = count * static_cast<int>(folds);
    float top[kUsed], total[kUsed] = {}, factor[kUsed];
    int32_t ends[kUsed], begins[kUsed];  // the range of keys that a row sees
    std::fill(top, top + kUsed, kHidden);
    std::fill(tile.query.begin(), tile.query.end(), 0.0f);
    std::fill(tile.sum.begin(), tile.sum.end(), 0.0f);
    for (int lane = 0; lane < kUsed; ++lane) {
        const int64_t query = std::min(lane, used - 1) / folds, fold = std::min(lane, used - 1) % folds;
        ends[lane] = static_cast<int32_t>(position + query + 1);
        begins[lane] = a.window > 0 ? static_cast<int32_t>(std::max<int64_t>(0, ends[lane] - a.window)) : 0;
        if (lane >= used) continue;
        const T* from = q + query * a.q_stride + (kv_head * folds + fold) * d;
        for (int64_t i = 0; i < d; ++i) tile.query[i * kLanes + lane] = wide(from[i]) * a.scale;
    }
    for (int64_t block = begins[0]; block < position + count; block += kBlock) {
        const int n = static_cast<int>(std::min<int64_t>(kBlock, position + count - block));
        float* scores = tile.scores.data();
        read_rows(a, keys, pages, kv_head, block, n, tile.rows.data());
        multiply<V>(tile.rows.data(), n, d, 1, tile.query.data(), d, scores, false);
        if (a.soft_cap > 0.0f)
            for (int i = 0; i < n * kLanes; ++i)
                if (i % kLanes < kUsed) scores[i] = a.soft_cap * std::tanh(scores[i] / a.soft_cap);
        if (block + n > position + 1 || a.window > 0)
            for (int j = 0; j < n; ++j) {
                const int32_t key = static_cast<int32_t>(block + j);
#pragma omp simd
                for (int lane = 0; lane < kUsed; ++lane)
                    if (key >= ends[lane] || key < begins[lane]) scores[j * kLanes + lane] = kHidden;
            }
        float best[kUsed];
        std::memcpy(best, top, sizeof(best));
        for (int j = 0; j < n; ++j)
#pragma omp simd
            for (int lane = 0; lane < kUsed; ++lane) best[lane] = std::max(best[lane], scores[j * kLanes + lane]);
#pragma omp simd
        for (int lane = 0; lane < kUsed; ++lane) {
            factor[lane] = exponential(top[lane] - best[lane]);
            total[lane] *= factor[lane];
            top[lane] = best[lane];
        }
        for (int j = 0; j < n; ++j)
#pragma omp simd
            for (int lane = 0; lane < kUsed; ++lane) {
                const float weight = exponential(scores[j * kLanes + lane] - best[lane]);
                scores[j * kLanes + lane] = weight;
                total[lane] += weight;
            }
        if (block > begins[0])
            for (int64_t i = 0; i < d; ++i)
#pragma omp simd
                for (int lane = 0; lane < kUsed; ++lane) tile.sum[i * kLanes + lane] *= factor[lane];
        read_rows(a, values, pages, kv_head, block, n, tile.rows.data());
        multiply<V>(tile.rows.data(), d, 1, d, scores, n, tile.sum.data(), true);
    }
    for (int lane = 0; lane < used; ++lane) {
        const int64_t head = kv_head * folds + lane % folds;
        float scale = 1.0f, all = total[lane];
        if (a.sinks != nullptr) {
            const float most = std::max(top[lane], a.sinks[head]);
            scale = exponential(top[lane] - most);
            all = all * scale + exponential(a.sinks[head] - most);
        }
        T* to = out + lane / folds * width + head * d;
        for (int64_t i = 0; i < d; ++i) put(to + i, tile.sum[i * kLanes + lane] * scale / all);
    }
}

template <typename T>
void attend_tile(const Attention& a, const T* q, const T* keys, const T* values, const int32_t* pages, int64_t kv_head,
                 int64_t position, int count, Tile& tile, T* out) {
    const auto lanes_used = count * (a.heads / a.kv_heads);
    const auto run = lanes_used > 48   ? attend_lanes<4, T>
                     : lanes_used > 32 ? attend_lanes<3, T>
                     : lanes_used > 16 ? attend_lanes<2, T>
                                       : attend_lanes<1, T>;
    run(a, q, keys, values, pages, kv_head, position, count, tile, out);
}

struct Task {
    const Span* span;
    int64_t kv_first, kv_count, first;
    int count;  // queries
};

inline bool tiled(const Attention& a, const Span& span) {
    const int64_t folds = a.heads / a.kv_heads;
    return span.queries * folds >= kLanes / 4 && folds <= kLanes;
}

// Returns the tasks of all spans. Spans with enough rows are divided into tiles. In other spans each query is a task, with
// `together` key heads at a time.
inline std::vector<Task> tasks_of(const Attention& a, const Span* spans, int64_t count, int64_t together) {
    std::vector<Task> tasks;
    for (const Span* span = spans; span < spans + count; ++span) {
        const bool tiles = tiled(a, *span);
        const int64_t step = tiles ? kLanes / (a.heads / a.kv_heads) : 1, group = tiles ? 1 : together;
        for (int64_t first = 0; first < span->queries; first += step)
            for (int64_t kv = 0; kv < a.kv_heads; kv += group)
                tasks.push_back({span, kv, std::min(group, a.kv_heads - kv), first,
                                 static_cast<int>(std::min(step, span->queries - first))});
    }
    return tasks;
}

// Returns the number of adjacent key heads that are read together: as many as keep a block of keys in the first cache and
// leave work for all threads.
template <typename T>
int64_t heads_together(const Attention& a, const Span* spans, int64_t count) {
    const int64_t most = std::min<int64_t>(a.kv_heads, std::max<int64_t>(1, 512 / (a.d * sizeof(T))));
    int64_t queries = 0;
    for (int64_t i = 0; i < count; ++i) queries += tiled(a, spans[i]) ? 0 : spans[i].queries;
    return queries * a.kv_heads / most < 4 * omp_get_max_threads() ? 1 : most;
}

template <typename T, int D>
void attend_spans(const Attention& a, const T* q, const T* keys, const T* values, const Span* spans, int64_t count, T* out) {
    const int64_t folds = a.heads / a.kv_heads, width = a.heads * a.d, together = heads_together<T>(a, spans, count);
    int64_t work = 0;
    for (int64_t i = 0; i < count; ++i) work += spans[i].queries * (spans[i].position + spans[i].queries);
    const std::vector<Task> tasks = tasks_of(a, spans, count, together);
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
#pragma omp parallel if (num_tasks > 1 && work * width > 2 * kSerial)
    {
        std::vector<float> memory(together * folds * (2 * a.d + 2));
        std::optional<Tile> tile;
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < num_tasks; ++index) {
            const Task& task = tasks[index];
            const int64_t token = task.span->first + task.first, position = task.span->position + task.first;
            const int32_t* pages = a.page_table + task.span->row * a.table_stride;
            const T* query = q + token * a.q_stride;
            if (tiled(a, *task.span)) {
                if (!tile) tile.emplace(a.d);
                attend_tile(a, query, keys, values, pages, task.kv_first, position, task.count, *tile, out + token * width);
                continue;
            }
            const int64_t begin = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
            const int64_t place = task.kv_first * folds * a.d;
            attend_query<T, D>(a, query + place, keys, values, pages, task.kv_first, task.kv_count, begin, position + 1,
                               memory.data(), out + token * width + place);
        }
    }
}

template <typename T>
void attend(const Attention& a, const T* q, const T* keys, const T* values, const Span* spans, int64_t count, T* out) {
    if (a.d == 64)
        attend_spans<T, 64>(a, q, keys, values, spans, count, out);
    else if (a.d == 128)
        attend_spans<T, 128>(a, q, keys, values, spans, count, out);
    else
        attend_spans<T, 0>(a, q, keys, values, spans, count, out);
}

}  // namespace

#define EXPORT(T, NAME)                                                                                                     \
    extern "C" void rms_norm_##NAME(T* x, const T* residual, const T* weight, T* out, int64_t rows, int64_t heads,            \
                                    int64_t stride, int64_t d, float eps) {                                                 \
        rms_norm(x, residual, weight, out, rows, heads, stride, d, eps);                                                    \
    }                                                                                                                       \
    extern "C" void rms_norm_wide_##NAME(T* x, const T* residual, const float* weight, T* out, int64_t rows, int64_t heads,   \
                                         int64_t stride, int64_t d, float eps) {                                            \
        rms_norm(x, residual, weight, out, rows, heads, stride, d, eps);                                                    \
    }                                                                                                                       \
    extern "C" void rotary_##NAME(const T* x, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads,              \
                                  int64_t stride, int64_t d, int64_t angle_stride) {                                        \
        rotary(x, cos, sin, out, tokens, heads, stride, d, angle_stride);                                                   \
    }                                                                                                                       \
    extern "C" void silu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t n) { silu_mul(gate_up, out, rows, n); } \
    extern "C" void gelu_tanh_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t n) {                                \
        gelu_tanh_mul(gate_up, out, rows, n);                                                                               \
    }                                                                                                                       \
    extern "C" void product_##NAME(const T* weight, const T* x, const T* bias, T* out, int64_t m, int64_t n, int64_t d) {     \
        product(weight, x, bias, out, m, n, d);                                                                             \
    }                                                                                                                       \
    extern "C" void mxfp4_product_##NAME(const uint8_t* codes, const uint8_t* scales, const T* x, const T* bias, T* out,        \
                                         int64_t m, int64_t n, int64_t d) {                                                 \
        mxfp4_product(codes, scales, x, bias, out, m, n, d);                                                                \
    }                                                                                                                       \
    extern "C" void mxfp4_weight_##NAME(const uint8_t* codes, const uint8_t* scales, T* out, int64_t n, int64_t d) {          \
        mxfp4_weight(codes, scales, out, n, d);                                                                             \
    }                                                                                                                       \
    extern "C" void store_##NAME(const T* k, const T* v, T* keys, T* values, const int64_t* out_loc, int64_t tokens,          \
                                 int64_t k_stride, int64_t v_stride, int64_t width) {                                       \
        store(k, v, keys, values, out_loc, tokens, k_stride, v_stride, width);                                              \
    }                                                                                                                       \
    extern "C" void attend_##NAME(const T* q, const T* keys, const T* values, const int32_t* page_table,                      \
                                  const int64_t* spans, const float* sinks, T* out, int64_t count, int64_t q_stride,          \
                                  int64_t table_stride, int64_t page_size, int64_t heads, int64_t kv_heads, int64_t d, int64_t window, float scale, \
                                  float soft_cap) {                                                                         \
        const Attention a{page_table, sinks, q_stride, table_stride, page_size, heads, kv_heads, d, window, scale, soft_cap};         \
        attend(a, q, keys, values, reinterpret_cast<const Span*>(spans), count, out);                                       \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
