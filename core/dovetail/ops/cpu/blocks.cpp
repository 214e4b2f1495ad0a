// Products with weights in the block formats of GGUF (dovetail/ops/gguf.py), on the CPU.
//
// Every format is read in one form: for each group of 32 columns 32 unsigned codes u, and for each half of it a scale d and an
// offset m, so that a weight is d * u + m. Inputs are quantized to signed 8-bit codes q with one scale for each 32 columns, as
// llama.cpp does. The product of a group is then d * scale * sum(u * q) + m * scale * sum(q), whose sums are exact integers.
//
// With many inputs, weights are decoded to bfloat16 and multiplied with inputs rounded to bfloat16, by AMX where the processor has it,
// otherwise by the products of bfloat16 of AVX-512.
//
// Every row is computed separately and in one order, so a result does not depend on the other rows of the batch. The Python
// side (dovetail/ops/cpu/blocks.py) documents and checks the arguments.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <limits>
#include <omp.h>
#include <sys/syscall.h>
#include <type_traits>
#include <unistd.h>
#include <vector>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "products with weights in blocks need a processor with AVX2, FMA and F16C"
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline float half(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

constexpr int kGroup = 32;   // columns of a group
constexpr int kGroups = 8;   // groups that are read together: one block of the K formats
constexpr int kHalves = 16;  // and halves of groups

using Codes = __m256i;  // 32 bytes

inline Codes load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Codes*>(from)); }
inline Codes low(Codes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Codes shifted(Codes x, int bits, int mask) {  // each byte, shifted to the right
    return _mm256_and_si256(_mm256_srl_epi16(x, _mm_cvtsi32_si128(bits)), _mm256_set1_epi8(static_cast<char>(mask)));
}

// Returns the low parts of 16 bytes, then the high parts.
inline Codes nibbles(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return low(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes));
}

// Returns 16 where bit i of 32 bits is set, else 0.
inline Codes fifth_bits(const uint8_t* from) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    const Codes bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)),
                                            _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const Codes own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own), _mm256_set1_epi8(16));
}

// Returns 1 << bit where the bit of the byte is set, moved to bit `to`.
inline Codes one_bit(Codes bytes, int from, int to) {
    return _mm256_sll_epi16(_mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(from)), _mm256_set1_epi8(1)), _mm_cvtsi32_si128(to));
}

inline Codes looked_up(Codes codes, __m128i table) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes); }

// Formats of 32 columns. `scales` fills d and m of `groups` consecutive blocks, and those of the others up to 8 with 0; `codes`
// returns those of group g.

template <int Bytes>
struct Small {
    static constexpr int columns = 32, bytes = Bytes;
    static constexpr bool halves = false;
    static const uint8_t* block(const uint8_t* from, int g) { return from + g * Bytes; }

    // Returns the first four bytes of 8 blocks, and 0 for those after the first `groups`.
    static __m256i words(const uint8_t* from, int groups) {
        const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(groups), numbers);
        return _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), reinterpret_cast<const int*>(from),
                                           _mm256_mullo_epi32(numbers, _mm256_set1_epi32(Bytes)), there, 1);
    }

    // Returns the float16 numbers in the low halves of 8 words.
    static __m256 halves_of(__m256i words) {
        const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
        return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    }

    static void scale_and_offset(const uint8_t* from, int groups, float* d, float* m, float offset) {
        const __m256 scales = halves_of(words(from, groups));
        _mm256_store_ps(d, scales);
        _mm256_store_ps(m, _mm256_mul_ps(scales, _mm256_set1_ps(offset)));
    }
    static void scale_and_least(const uint8_t* from, int groups, float* d, float* m) {
        const __m256i both = words(from, groups);
        _mm256_store_ps(d, halves_of(both));
        _mm256_store_ps(m, halves_of(_mm256_srli_epi32(both, 16)));
    }
};

struct Q4_0 : Small<18> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_offset(from, groups, d, m, -8.0f);
    }
    static Codes codes(const uint8_t* from, int g) { return nibbles(block(from, g) + 2); }
};

struct Q4_1 : Small<20> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_least(from, groups, d, m);
    }
    static Codes codes(const uint8_t* from, int g) { return nibbles(block(from, g) + 4); }
};

struct Q5_0 : Small<22> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_offset(from, groups, d, m, -16.0f);
    }
    static Codes codes(const uint8_t* from, int g) {
        return _mm256_or_si256(nibbles(block(from, g) + 6), fifth_bits(block(from, g) + 2));
    }
};

struct Q5_1 : Small<24> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_least(from, groups, d, m);
    }
    static Codes codes(const uint8_t* from, int g) {
        return _mm256_or_si256(nibbles(block(from, g) + 8), fifth_bits(block(from, g) + 4));
    }
};

struct Q8_0 : Small<34> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_offset(from, groups, d, m, -128.0f);
    }
    static Codes codes(const uint8_t* from, int g) {
        return _mm256_xor_si256(load(block(from, g) + 2), _mm256_set1_epi8(static_cast<char>(0x80)));
    }
};

// The 16 values of IQ4_NL and IQ4_XS, plus 128.
inline __m128i iq4_values() {
    return _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, static_cast<char>(129), static_cast<char>(141), static_cast<char>(153), static_cast<char>(166),
                         static_cast<char>(181), static_cast<char>(197), static_cast<char>(217), static_cast<char>(241));
}

struct IQ4_NL : Small<18> {
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        scale_and_offset(from, groups, d, m, -128.0f);
    }
    static Codes codes(const uint8_t* from, int g) { return looked_up(nibbles(block(from, g) + 2), iq4_values()); }
};

struct MXFP4 : Small<17> {  // twice the values of E2M1, plus 12
    static void scales(const uint8_t* from, int groups, float* d, float* m) {
        for (int g = 0; g < kGroups; ++g) d[g] = g < groups ? std::ldexp(1.0f, block(from, g)[0] - 128) : 0.0f, m[g] = -12.0f * d[g];
    }
    static Codes codes(const uint8_t* from, int g) {
        return looked_up(nibbles(block(from, g) + 1), _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    }
};

// Formats of 256 columns.

template <int Bytes, bool Halves>
struct Large {
    static constexpr int columns = 256, bytes = Bytes;
    static constexpr bool halves = Halves;
};

struct Q2_K : Large<84, true> {
    static void scales(const uint8_t* from, int, float* d, float* m) {
        const float scale = half(from + 80), least = half(from + 82);
        for (int h = 0; h < kHalves; ++h) d[h] = scale * (from[h] & 15), m[h] = -least * (from[h] >> 4);
    }
    static Codes codes(const uint8_t* from, int g) { return shifted(load(from + 16 + g / 4 * 32), 2 * (g % 4), 3); }
};

struct Q3_K : Large<110, true> {
    static void scales(const uint8_t* from, int, float* d, float* m) {
        const uint8_t* packed = from + 96;
        const float scale = half(from + 108);
        for (int h = 0; h < kHalves; ++h) {
            const int four = h < 8 ? packed[h] & 15 : packed[h - 8] >> 4;
            const int two = packed[8 + h % 4] >> (2 * (h / 4)) & 3;
            d[h] = scale * ((four | two << 4) - 32), m[h] = -4.0f * d[h];
        }
    }
    static Codes codes(const uint8_t* from, int g) {
        return _mm256_or_si256(shifted(load(from + 32 + g / 4 * 32), 2 * (g % 4), 3), one_bit(load(from), g, 2));
    }
};

// Fills d and m of Q4_K and Q5_K from 12 bytes with 6 bits each of 8 scales and 8 offsets.
inline void six_bits(const uint8_t* from, float* d, float* m) {
    const float scale = half(from), least = half(from + 2);
    const uint8_t* packed = from + 4;
    for (int g = 0; g < 4; ++g) {
        d[g] = scale * (packed[g] & 63), m[g] = -least * (packed[g + 4] & 63);
        d[g + 4] = scale * ((packed[g + 8] & 15) | packed[g] >> 6 << 4);
        m[g + 4] = -least * (packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
    }
}

struct Q4_K : Large<144, false> {
    static void scales(const uint8_t* from, int, float* d, float* m) { six_bits(from, d, m); }
    static Codes codes(const uint8_t* from, int g) { return shifted(load(from + 16 + g / 2 * 32), 4 * (g % 2), 15); }
};

struct Q5_K : Large<176, false> {
    static void scales(const uint8_t* from, int, float* d, float* m) { six_bits(from, d, m); }
    static Codes codes(const uint8_t* from, int g) {
        return _mm256_or_si256(shifted(load(from + 48 + g / 2 * 32), 4 * (g % 2), 15), one_bit(load(from + 16), g, 4));
    }
};

struct Q6_K : Large<210, true> {
    static void scales(const uint8_t* from, int, float* d, float* m) {
        const float scale = half(from + 208);
        for (int h = 0; h < kHalves; ++h) d[h] = scale * static_cast<int8_t>(from[192 + h]), m[h] = -32.0f * d[h];
    }
    static Codes codes(const uint8_t* from, int g) {
        const int part = g % 4;
        const Codes four = shifted(load(from + g / 4 * 64 + part % 2 * 32), part / 2 * 4, 15);
        const Codes two = shifted(load(from + 128 + g / 4 * 32), 2 * part, 3);
        return _mm256_or_si256(four, _mm256_slli_epi16(two, 4));
    }
};

struct IQ4_XS : Large<136, false> {
    static void scales(const uint8_t* from, int, float* d, float* m) {
        const float scale = half(from);
        const int high = from[2] | from[3] << 8;
        for (int g = 0; g < kGroups; ++g) {
            const int six = (from[4 + g / 2] >> (4 * (g % 2)) & 15) | (high >> (2 * g) & 3) << 4;
            d[g] = scale * (six - 32), m[g] = -128.0f * d[g];
        }
    }
    static Codes codes(const uint8_t* from, int g) { return looked_up(nibbles(from + 8 + 16 * g), iq4_values()); }
};

// Quantized inputs: for each row and group 32 codes, a scale, and scale * sum(codes) of the group, or of its halves.
struct Inputs {
    const int8_t* codes;   // [rows, groups * 32]
    const float* scales;   // [rows, groups]
    const float* sums;     // [rows, groups * 2]
    int64_t groups;        // of a row, in memory: a multiple of kGroups; those after the last one are 0
};

inline __m256i products(Codes weights, __m256i inputs) {  // sums of 4 adjacent products of unsigned and signed bytes
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), weights, inputs);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), weights, inputs);
#else  // _mm256_maddubs_epi16 would saturate
    const __m256i zero = _mm256_setzero_si256(), sign = _mm256_cmpgt_epi8(zero, inputs);
    const __m256i first = _mm256_madd_epi16(_mm256_unpacklo_epi8(weights, zero), _mm256_unpacklo_epi8(inputs, sign));
    const __m256i second = _mm256_madd_epi16(_mm256_unpackhi_epi8(weights, zero), _mm256_unpackhi_epi8(inputs, sign));
    return _mm256_hadd_epi32(first, second);
#endif
}

inline float lane_sum(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Computes the products of one row of weights and M inputs.
template <typename F, int M>
void row_products(const uint8_t* weights, const Inputs& x, int64_t first, int64_t groups, float* out) {
    __m256 sums[M], others[M];  // two, so that an addition need not wait for the one before
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i] = others[i] = _mm256_setzero_ps();
    alignas(32) float d[kHalves] = {}, m[kHalves] = {}, scaled[M][kHalves];
    for (int64_t begin = 0; begin < groups; begin += kGroups, weights += kGroups * kGroup / F::columns * F::bytes) {
        const int count = static_cast<int>(std::min<int64_t>(kGroups, groups - begin));
        F::scales(weights, count, d, m);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const int64_t place = (first + i) * x.groups + begin;
            const __m256 scales = _mm256_loadu_ps(x.scales + place);
            const __m256 left = _mm256_loadu_ps(x.sums + 2 * place), right = _mm256_loadu_ps(x.sums + 2 * place + 8);
            if constexpr (F::halves) {
                const __m256 low = _mm256_unpacklo_ps(scales, scales), high = _mm256_unpackhi_ps(scales, scales);
                _mm256_store_ps(scaled[i], _mm256_mul_ps(_mm256_load_ps(d), _mm256_permute2f128_ps(low, high, 0x20)));
                _mm256_store_ps(scaled[i] + 8, _mm256_mul_ps(_mm256_load_ps(d + 8), _mm256_permute2f128_ps(low, high, 0x31)));
                sums[i] = _mm256_fmadd_ps(_mm256_load_ps(m), left, sums[i]);
                sums[i] = _mm256_fmadd_ps(_mm256_load_ps(m + 8), right, sums[i]);
            } else {
                const __m256 both = _mm256_hadd_ps(left, right);  // groups 0 1 4 5 2 3 6 7
                const __m256 whole = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(both), 0xd8));
                _mm256_store_ps(scaled[i], _mm256_mul_ps(_mm256_load_ps(d), scales));
                sums[i] = _mm256_fmadd_ps(_mm256_load_ps(m), whole, sums[i]);
            }
        }
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
            if (g >= count) break;
            const Codes codes = F::codes(weights, g);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                const int8_t* input = x.codes + ((first + i) * x.groups + begin + g) * kGroup;
                const __m256i sum = products(codes, load(reinterpret_cast<const uint8_t*>(input)));
                __m256 factor;
                if constexpr (F::halves)
                    factor = _mm256_set_m128(_mm_broadcast_ss(scaled[i] + 2 * g + 1), _mm_broadcast_ss(scaled[i] + 2 * g));
                else
                    factor = _mm256_broadcast_ss(scaled[i] + g);
                __m256& to = g % 2 ? others[i] : sums[i];
                to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, to);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) out[i] = lane_sum(_mm256_add_ps(sums[i], others[i]));
}

#ifdef __AVX512VL__
constexpr int kInputs = 8;
#else  // half as many registers
constexpr int kInputs = 4;
#endif

template <typename F>
void row_products(const uint8_t* weights, const Inputs& x, int64_t first, int count, int64_t groups, float* out) {
    switch (count) {
        case 1: return row_products<F, 1>(weights, x, first, groups, out);
        case 2: return row_products<F, 2>(weights, x, first, groups, out);
        case 3: return row_products<F, 3>(weights, x, first, groups, out);
        case 4: return row_products<F, 4>(weights, x, first, groups, out);
        case 5: return row_products<F, 5>(weights, x, first, groups, out);
        case 6: return row_products<F, 6>(weights, x, first, groups, out);
        case 7: return row_products<F, 7>(weights, x, first, groups, out);
        default: return row_products<F, kInputs>(weights, x, first, groups, out);
    }
}

constexpr int64_t kSerial = 1 << 16;  // weights below which handing work to threads costs more than it saves

// Rows of weights in one format.
struct Segment {
    const uint8_t* weights;
    int64_t format, rows;
};

template <typename F, typename T>
void weight(const uint8_t* weights, T* out, int64_t n, int64_t columns) {
    const int64_t groups = columns / kGroup, bytes = columns / F::columns * F::bytes;
#pragma omp parallel for if (n * columns > kSerial) schedule(static)
    for (int64_t row = 0; row < n; ++row) {
        const uint8_t* from = weights + row * bytes;
        T* to = out + row * columns;
        for (int64_t begin = 0; begin < groups; begin += kGroups, from += kGroups * kGroup / F::columns * F::bytes) {
            const int count = static_cast<int>(std::min<int64_t>(kGroups, groups - begin));
            alignas(32) float d[kHalves], m[kHalves];
            F::scales(from, count, d, m);
            for (int g = 0; g < count; ++g) {
                alignas(32) uint8_t codes[kGroup];
                _mm256_store_si256(reinterpret_cast<Codes*>(codes), F::codes(from, g));
                for (int i = 0; i < kGroup; ++i) {
                    const int at = F::halves ? 2 * g + i / 16 : g;
                    put(to + (begin + g) * kGroup + i, d[at] * codes[i] + m[at]);
                }
            }
        }
    }
}

// Calls f with the format of a number: its place in FORMATS of dovetail/ops/cpu/blocks.py.
template <typename Function>
void with_format(int64_t format, Function f) {
    switch (format) {
        case 0: return f(Q4_0{});
        case 1: return f(Q4_1{});
        case 2: return f(Q5_0{});
        case 3: return f(Q5_1{});
        case 4: return f(Q8_0{});
        case 5: return f(Q2_K{});
        case 6: return f(Q3_K{});
        case 7: return f(Q4_K{});
        case 8: return f(Q5_K{});
        case 9: return f(Q6_K{});
        case 10: return f(IQ4_NL{});
        case 11: return f(IQ4_XS{});
        default: return f(MXFP4{});
    }
}

template <typename T>
void quantize(const T* x, int8_t* codes, float* scales, float* sums, int64_t rows, int64_t columns, int64_t padded) {
    const int64_t groups = columns / kGroup;
#pragma omp parallel for if (rows * columns > kSerial) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t g = 0; g < padded; ++g) {
            const int64_t place = row * padded + g;
            float values[kGroup] = {}, most = 0.0f;
            if (g < groups)
                for (int i = 0; i < kGroup; ++i) values[i] = wide(x[row * columns + g * kGroup + i]);
            for (int i = 0; i < kGroup; ++i) most = std::max(most, std::fabs(values[i]));
            bool finite = true;  // otherwise the scale is NaN, and so is every result
            for (int i = 0; i < kGroup; ++i) finite &= std::fabs(values[i]) <= std::numeric_limits<float>::max();
            const float inverse = finite && most > 0.0f ? 127.0f / most : 0.0f;
            const float scale = finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
            int both[2] = {};
            for (int i = 0; i < kGroup; ++i) {
                const int code = finite ? static_cast<int>(std::nearbyint(values[i] * inverse)) : 0;
                codes[place * kGroup + i] = static_cast<int8_t>(code);
                both[i / 16] += code;
            }
            scales[place] = scale;
            sums[2 * place] = scale * both[0], sums[2 * place + 1] = scale * both[1];
        }
}

// Computes rows [begin, end) of a segment for all inputs. `row` is the place of its first row in an output row.
template <typename F, typename T>
void multiply(const uint8_t* weights, const Inputs& x, const T* bias, T* out, int64_t m, int64_t begin, int64_t end, int64_t place,
              int64_t columns, int64_t stride) {
    const int64_t groups = columns / kGroup, bytes = columns / F::columns * F::bytes;
    for (int64_t row = begin; row < end; ++row) {
        float sums[kInputs];
        for (int64_t first = 0; first < m; first += kInputs) {
            const int count = static_cast<int>(std::min<int64_t>(kInputs, m - first));
            row_products<F>(weights + row * bytes, x, first, count, groups, sums);
            for (int i = 0; i < count; ++i)
                put(out + (first + i) * stride + place + row, sums[i] + (bias ? wide(bias[place + row]) : 0.0f));
        }
    }
}

// Computes the products of all segments, whose rows follow each other in an output row. Every thread takes an equal part of the rows.
template <typename T>
void product(const Segment* segments, int64_t count, const T* x, const T* bias, T* out, int64_t m, int64_t n, int64_t columns) {
    static thread_local std::vector<int8_t> codes;
    static thread_local std::vector<float> scales;
    const int64_t groups = (columns / kGroup + kGroups - 1) / kGroups * kGroups;
    codes.resize(m * groups * kGroup);
    scales.resize(m * groups * 3);
    float* sums = scales.data() + m * groups;
    quantize(x, codes.data(), scales.data(), sums, m, columns, groups);
    const Inputs inputs{codes.data(), scales.data(), sums, groups};
#pragma omp parallel if (n * columns * m > kSerial)
    {
        const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
        const int64_t first = n * own / threads, last = n * (own + 1) / threads;
        int64_t place = 0;
        for (const Segment* segment = segments; segment < segments + count; place += segment->rows, ++segment) {
            const int64_t begin = std::max<int64_t>(first - place, 0), end = std::min(last - place, segment->rows);
            if (begin < end)
                with_format(segment->format, [&](auto f) {
                    multiply<decltype(f)>(segment->weights, inputs, bias, out, m, begin, end, place, columns, n);
                });
        }
    }
}

// Many rows: weights are decoded to bfloat16 in tiles, which are multiplied with inputs in bfloat16. Sums are in float. A tile of
// weights is what an instruction of AMX reads: 16 pairs of columns, for 16 rows of the weight. AVX-512 reads one pair of all rows.

enum TileKind : int32_t { kNoTiles, kAmxTiles, kVectorTiles };

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define WITH_AMX
#endif

constexpr int kTile = 16;                  // rows of a tile
constexpr int kTileSize = kTile * kGroup;  // elements of a tile
constexpr int64_t kDecoded = 1 << 19;      // elements of decoded weights that are multiplied together, so that caches hold them
constexpr int kVectorInputs = 12;          // inputs that are multiplied together by AVX-512: their sums with two tiles fill its registers

#ifdef WITH_AMX
// Asks the system for the registers of AMX. Returns whether they may be used.
TileKind tile_kind() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return allowed ? kAmxTiles : kVectorTiles;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; ++i) columns[i] = 64, rows[i] = kTile;
    }
};
#else
TileKind tile_kind() { return kVectorTiles; }
#endif

// Returns number j of 8 numbers of 16 rows, for each j. `rows` are 16 times 32 bytes, `stride` bytes apart.
inline void transposed(const void* rows, int stride, __m512i out[8]) {
    const char* from = static_cast<const char*>(rows);
    __m512i both[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const int row = i % 4 + i / 4 * 8;
        const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + row * stride));
        const __m256i second = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + (row + 4) * stride));
        both[i] = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = _mm512_unpacklo_epi32(both[2 * i], both[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(both[2 * i], both[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {  // fours[4 * i + j]: number j of the first half of a row, and of the second
        fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        out[j] = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        out[4 + j] = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    }
}

// Writes two pairs of columns of a tile. `codes` has 4 codes of each of 16 rows.
inline void decode_pairs(__m512i codes, __m512 d, __m512 m, uint16_t* to) {
    const __m512i byte = _mm512_set1_epi32(255);
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                                 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 values[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i code = i == 3 ? _mm512_srli_epi32(codes, 24) : _mm512_and_si512(_mm512_srli_epi32(codes, 8 * i), byte);
        values[i] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(code), m);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512bh both = _mm512_cvtne2ps_pbh(values[2 * i + 1], values[2 * i]);
        __m512i words;
        std::memcpy(&words, &both, 64);
        _mm512_store_si512(to + i * 2 * kTile, _mm512_permutexvar_epi16(interleaved, words));
    }
}

// Decodes `count` rows of weights, at most 16, to a tile for each group. What follows them in a tile has no meaning.
template <typename F>
void decode(const uint8_t* weights, int64_t bytes, int count, int64_t groups, uint16_t* to) {
    alignas(64) float d[kTile][kHalves] = {}, m[kTile][kHalves] = {};
    alignas(64) uint8_t codes[kTile][kGroup];
    __m512i scales[2][8], offsets[2][8];
    const uint8_t* rows[kTile];
    for (int i = 0; i < kTile; ++i) rows[i] = weights + std::min(i, count - 1) * bytes;
    for (int64_t begin = 0; begin < groups; begin += kGroups) {
        const int here = static_cast<int>(std::min<int64_t>(kGroups, groups - begin));
        const int64_t offset = begin * kGroup / F::columns * F::bytes;
        for (int i = 0; i < kTile; ++i) F::scales(rows[i] + offset, here, d[i], m[i]);
        for (int i = 0; i <= F::halves; ++i) {
            transposed(d[0] + 8 * i, sizeof d[0], scales[i]);
            transposed(m[0] + 8 * i, sizeof m[0], offsets[i]);
        }
        for (int g = 0; g < here; ++g, to += kTileSize) {
            for (int i = 0; i < kTile; ++i) {
                _mm256_store_si256(reinterpret_cast<Codes*>(codes[i]), F::codes(rows[i] + offset, g));
                _mm_prefetch(reinterpret_cast<const char*>(rows[i] + offset + F::bytes * kGroups * kGroup / F::columns), _MM_HINT_T0);
            }
            __m512i four[8];
            transposed(codes, kGroup, four);
            const __m512* first = reinterpret_cast<const __m512*>(scales[0]);
            const __m512* least = reinterpret_cast<const __m512*>(offsets[0]);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                const int at = F::halves ? 2 * g + j / 4 : g;
                decode_pairs(four[j], first[at], least[at], to + j * 4 * kTile);
            }
        }
    }
}

// Writes `x` as bfloat16, [rows, columns], from row `begin` to `end`.
template <typename T>
void to_bf16(const T* x, uint16_t* out, int64_t begin, int64_t end, int64_t columns) {
    if constexpr (std::is_same_v<T, bf16>)
        std::memcpy(out + begin * columns, x + begin * columns, (end - begin) * columns * 2);
    else
        for (int64_t i = begin * columns; i < end * columns; i += kGroup) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
            std::memcpy(out + i, &both, 64);
        }
}

// Where a product of tiles is written: `out` is the first element of [rows, stride]. `bias`, if it is not null, has a number for
// each of its columns.
template <typename T>
struct Target {
    T* out;
    const T* bias;
    int64_t rows, stride;
};

// Multiplies `kVectorInputs` rows of inputs with 16 rows of weights, or 32.
template <typename T, bool TwoWeights>
void multiply_vectors(const uint16_t* x, const uint16_t* weights, int64_t groups, const Target<T>& to, int64_t row, int64_t column,
                      int64_t columns) {
    constexpr int tiles = TwoWeights ? 2 : 1;
    const int64_t stride = groups * kGroup;
    const uint16_t* others = weights + groups * kTileSize;
    __m512 sums[kVectorInputs][tiles];
#pragma GCC unroll 12
    for (int i = 0; i < kVectorInputs; ++i)
        for (int j = 0; j < tiles; ++j) sums[i][j] = _mm512_setzero_ps();
    for (int64_t at = 0; at < groups * (kGroup / 2); ++at) {
        __m512bh first, second;
        std::memcpy(&first, weights + at * 2 * kTile, 64);
        if constexpr (TwoWeights) std::memcpy(&second, others + at * 2 * kTile, 64);
#pragma GCC unroll 12
        for (int i = 0; i < kVectorInputs; ++i) {
            int32_t pair;
            std::memcpy(&pair, x + i * stride + 2 * at, 4);
            const __m512i all = _mm512_set1_epi32(pair);
            __m512bh inputs;
            std::memcpy(&inputs, &all, 64);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], first, inputs);
            if constexpr (TwoWeights) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], second, inputs);
        }
    }
    const int64_t count = std::min<int64_t>(kVectorInputs, to.rows - row);
    for (int64_t i = 0; i < count; ++i)
        for (int j = 0; j < tiles; ++j) {
            const int64_t here = std::min<int64_t>(kTile, columns - j * kTile), from = column + j * kTile;
            T* out = to.out + (row + i) * to.stride + from;
            if constexpr (std::is_same_v<T, float>)
                if (to.bias == nullptr && here == kTile) {
                    _mm512_storeu_ps(out, sums[i][j]);
                    continue;
                }
            alignas(64) float values[kTile];
            _mm512_store_ps(values, sums[i][j]);
            for (int64_t k = 0; k < here; ++k) put(out + k, values[k] + (to.bias ? wide(to.bias[from + k]) : 0.0f));
        }
}

#ifdef WITH_AMX
template <int Number>
inline void stored(void* to, int64_t stride) {  // the numbers of tiles are written in the instructions
    if constexpr (Number == 0) _tile_stored(0, to, stride);
    if constexpr (Number == 1) _tile_stored(1, to, stride);
    if constexpr (Number == 2) _tile_stored(2, to, stride);
    if constexpr (Number == 3) _tile_stored(3, to, stride);
}

// Writes tile `Number` to the rows from `row` on that exist, and to `columns` columns (at most 16 are written) from `column` on.
template <typename T, int Number>
void store_tile(const Target<T>& to, int64_t row, int64_t column, int64_t columns) {
    const int64_t count = std::min<int64_t>(kTile, to.rows - row);
    if constexpr (std::is_same_v<T, float>)
        if (to.bias == nullptr && count == kTile && columns == kTile) {
            stored<Number>(to.out + row * to.stride + column, to.stride * 4);
            return;
        }
    alignas(64) float sums[kTile][kTile];
    stored<Number>(sums, 64);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < columns; ++j)
            put(to.out + (row + i) * to.stride + column + j, sums[i][j] + (to.bias ? wide(to.bias[column + j]) : 0.0f));
}

// Multiplies 16 rows of inputs, or 32, with 16 rows of weights, or 32.
template <typename T, bool TwoInputs, bool TwoWeights>
void multiply_tiles(const uint16_t* x, const uint16_t* weights, int64_t groups, const Target<T>& to, int64_t row, int64_t column,
                    int64_t columns) {
    const int64_t bytes = groups * kGroup * 2;
    const uint16_t* more = x + kTile * groups * kGroup;
    const uint16_t* others = weights + groups * kTileSize;
    _tile_zero(0);
    if constexpr (TwoWeights) _tile_zero(1);
    if constexpr (TwoInputs) _tile_zero(2);
    if constexpr (TwoInputs && TwoWeights) _tile_zero(3);
    for (int64_t g = 0; g < groups; ++g) {
        _tile_loadd(4, x + g * kGroup, bytes);
        _tile_loadd(6, weights + g * kTileSize, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TwoWeights) {
            _tile_loadd(7, others + g * kTileSize, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TwoInputs) {
            _tile_loadd(5, more + g * kGroup, bytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (TwoWeights) _tile_dpbf16ps(3, 5, 7);
        }
    }
    store_tile<T, 0>(to, row, column, std::min<int64_t>(columns, kTile));
    if constexpr (TwoWeights) store_tile<T, 1>(to, row, column + kTile, columns - kTile);
    if constexpr (TwoInputs) store_tile<T, 2>(to, row + kTile, column, std::min<int64_t>(columns, kTile));
    if constexpr (TwoInputs && TwoWeights) store_tile<T, 3>(to, row + kTile, column + kTile, columns - kTile);
}
#endif

// Multiplies the inputs from row `input` on with 16 rows of decoded weights, or 32. Returns the number of inputs.
template <typename T>
int64_t multiply_some(const uint16_t* x, const uint16_t* weights, int64_t groups, const Target<T>& to, int64_t input, int64_t column,
                      int64_t columns) {
    const bool rows = columns > kTile;
#ifdef WITH_AMX
    if (tile_kind() == kAmxTiles) {
        const bool inputs = to.rows - input > kTile;
        const auto call = inputs ? (rows ? multiply_tiles<T, true, true> : multiply_tiles<T, true, false>)
                                 : (rows ? multiply_tiles<T, false, true> : multiply_tiles<T, false, false>);
        call(x, weights, groups, to, input, column, columns);
        return 2 * kTile;
    }
#endif
    (rows ? multiply_vectors<T, true> : multiply_vectors<T, false>)(x, weights, groups, to, input, column, columns);
    return kVectorInputs;
}

// Computes rows [begin, end) of a segment for all inputs, which are bfloat16. `memory` holds decoded weights.
template <typename F, typename T>
void multiply_decoded(const uint8_t* weights, const uint16_t* x, const Target<T>& to, int64_t begin, int64_t end, int64_t place,
                      int64_t columns, std::vector<uint16_t>& memory) {
    const int64_t groups = columns / kGroup, bytes = columns / F::columns * F::bytes;
    const int64_t most = to.rows <= 2 * kTile ? 1 : std::max<int64_t>(kDecoded / (2 * kTile * columns), 1);  // pairs of tiles
    memory.resize(most * 2 * kTile * columns + kTileSize);
    uint16_t* decoded = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    for (int64_t first = begin; first < end; first += most * 2 * kTile) {
        const int64_t last = std::min(end, first + most * 2 * kTile);
        for (int64_t row = first; row < last; row += kTile)
            decode<F>(weights + row * bytes, bytes, static_cast<int>(std::min<int64_t>(kTile, last - row)), groups,
                      decoded + (row - first) * columns);
        for (int64_t input = 0, next = 0; input < to.rows; input = next)
            for (int64_t row = first; row < last; row += 2 * kTile)
                next = input + multiply_some<T>(x + input * columns, decoded + (row - first) * columns, groups, to, input, place + row,
                                                std::min<int64_t>(2 * kTile, last - row));
    }
}

// Computes the products of all segments as `product` does, for many inputs.
template <typename T>
void tile_product(const Segment* segments, int64_t count, const T* x, const T* bias, T* out, int64_t m, int64_t n, int64_t columns) {
    static thread_local std::vector<uint16_t> inputs;
    const int64_t together = tile_kind() == kAmxTiles ? kTile : kVectorInputs, padded = (m + together - 1) / together * together;
    inputs.resize(padded * columns);
    uint16_t* all = inputs.data();
    std::fill(inputs.begin() + m * columns, inputs.end(), 0);
    const Target<T> target{out, bias, m, n};
#pragma omp parallel if (n * columns * m > kSerial)
    {
        static thread_local std::vector<uint16_t> memory;
        const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
        to_bf16(x, all, m * own / threads, m * (own + 1) / threads, columns);
#pragma omp barrier
#ifdef WITH_AMX
        static const TileConfig config;
        if (tile_kind() == kAmxTiles) asm volatile("ldtilecfg %0" ::"m"(config));  // of GCC before 14, _tile_loadconfig reads 8 bytes only
#endif
        const int64_t units = (n + kTile - 1) / kTile;
        const int64_t first = units * own / threads * kTile, last = std::min(n, units * (own + 1) / threads * kTile);
        int64_t place = 0;
        for (const Segment* segment = segments; segment < segments + count; place += segment->rows, ++segment) {
            const int64_t begin = std::max<int64_t>(first - place, 0), end = std::min(last - place, segment->rows);
            if (begin < end)
                with_format(segment->format, [&](auto f) {
                    multiply_decoded<decltype(f)>(segment->weights, all, target, begin, end, place, columns, memory);
                });
        }
#ifdef WITH_AMX
        if (tile_kind() == kAmxTiles) _tile_release();
#endif
    }
}
#else
TileKind tile_kind() { return kNoTiles; }

template <typename T>
void tile_product(const Segment*, int64_t, const T*, const T*, T*, int64_t, int64_t, int64_t) {}
#endif

}  // namespace

// Returns how `tiles_...` multiplies, or `kNoTiles` if it must not be called.
extern "C" int32_t tile_kind_of_processor() { return tile_kind(); }

#define EXPORT(T, NAME)                                                                                                      \
    extern "C" void quantize_##NAME(const T* x, int8_t* codes, float* scales, float* sums, int64_t rows, int64_t columns,     \
                                    int64_t padded) {                                                                        \
        quantize(x, codes, scales, sums, rows, columns, padded);                                                             \
    }                                                                                                                        \
    extern "C" void product_##NAME(const Segment* segments, const T* x, const T* bias, T* out, int64_t count, int64_t m,          \
                                   int64_t n, int64_t columns) {                                                             \
        product(segments, count, x, bias, out, m, n, columns);                                                               \
    }                                                                                                                        \
    extern "C" void tiles_##NAME(const Segment* segments, const T* x, const T* bias, T* out, int64_t count, int64_t m,            \
                                 int64_t n, int64_t columns) {                                                               \
        tile_product(segments, count, x, bias, out, m, n, columns);                                                          \
    }                                                                                                                        \
    extern "C" void weight_##NAME(const uint8_t* weights, T* out, int64_t format, int64_t n, int64_t columns) {               \
        with_format(format, [&](auto f) { weight<decltype(f)>(weights, out, n, columns); });                                 \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
