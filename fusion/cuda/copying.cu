// Copies between the tensors of a response and its fusion buffer: one launch for any number of tensors.
//
// Compiled once for each pair of element types that occurs: DATA is the type of the tensors, ACC that of the
// buffer, both numbers of the list below. ORDER is 0, or 1 (for a minimum) or 2 (for a maximum): the buffer then
// has integers that are ordered like the floats they stand for, with NaN before or after all others, because
// NCCL's own minimum and maximum drop NaN. No header is included, so that NVRTC alone is enough.
//
// A thread block copies one chunk, a stretch of one tensor. Each thread moves 16 bytes at a time on the wider
// side where both ends are aligned, and single elements elsewhere.

#define BOOL 0
#define UINT8 1
#define INT8 2
#define INT16 3
#define INT32 4
#define INT64 5
#define FLOAT16 6
#define BFLOAT16 7
#define FLOAT32 8
#define FLOAT64 9

#if DATA == BOOL || DATA == UINT8
typedef unsigned char data_t;
#elif DATA == INT8
typedef signed char data_t;
#elif DATA == INT16
typedef short data_t;
#elif DATA == INT32
typedef int data_t;
#elif DATA == INT64
typedef long long data_t;
#elif DATA == FLOAT16 || DATA == BFLOAT16
typedef unsigned short data_t;
#elif DATA == FLOAT32
typedef float data_t;
#else
typedef double data_t;
#endif

#if ACC == UINT8
typedef unsigned char acc_t;
#elif ACC == INT8
typedef signed char acc_t;
#elif ACC == INT32
typedef int acc_t;
#elif ACC == INT64
typedef long long acc_t;
#elif ACC == FLOAT16 || ACC == BFLOAT16
typedef unsigned short acc_t;
#elif ACC == FLOAT32
typedef float acc_t;
#else
typedef double acc_t;
#endif

// What one element is computed in.
#if DATA == FLOAT64
typedef double value_t;
#elif DATA == FLOAT16 || DATA == BFLOAT16 || DATA == FLOAT32
typedef float value_t;
#else
typedef long long value_t;
#endif
#define INTEGRAL (DATA <= INT64)

#define MAX_SIZE(a, b) ((int)(sizeof(a) > sizeof(b) ? sizeof(a) : sizeof(b)))
#define PER_VECTOR (16 / MAX_SIZE(data_t, acc_t))
#define AT_ONCE 4

template <int BYTES> struct Word;
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <typename T> union Vector {
    T element[PER_VECTOR];
    typename Word<(int)sizeof(T) * PER_VECTOR>::type word;
};

struct Chunk {
    long long start;  // first element inside the tensor
    long long at;     // first element inside the buffer
    int part;         // which tensor
    int count;        // elements
};

__device__ __forceinline__ float half_to_float(unsigned short bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return host_half_to_float(bits);
#endif
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
#ifdef __CUDA_ARCH__
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return host_float_to_half(value);
#endif
}

__device__ __forceinline__ float bfloat_to_float(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
    unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)0x7fc0;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ value_t from_data(data_t x) {
#if DATA == FLOAT16
    return half_to_float(x);
#elif DATA == BFLOAT16
    return bfloat_to_float(x);
#elif DATA == BOOL
    return x != 0;
#else
    return (value_t)x;
#endif
}

__device__ __forceinline__ data_t to_data(value_t x) {
#if DATA == FLOAT16
    return float_to_half(x);
#elif DATA == BFLOAT16
    return float_to_bfloat(x);
#elif DATA == BOOL
    return x != 0;
#else
    return (data_t)x;
#endif
}

__device__ __forceinline__ acc_t to_acc(value_t x) {
#if ORDER && DATA == FLOAT64
    long long bits = __double_as_longlong(x);
    if (x != x) return ORDER == 2 ? 0x7fffffffffffffffll : (long long)0x8000000000000000ull;
    return bits ^ ((bits >> 63) & 0x7fffffffffffffffll);
#elif ORDER
    int bits = (int)__float_as_uint(x);
    if (x != x) return ORDER == 2 ? 0x7fffffff : (int)0x80000000u;
    return bits ^ ((bits >> 31) & 0x7fffffff);
#elif ACC == FLOAT16
    return float_to_half(x);
#elif ACC == BFLOAT16
    return float_to_bfloat(x);
#else
    return (acc_t)x;
#endif
}

// The two values that stand for NaN come back as one.
__device__ __forceinline__ value_t from_acc(acc_t x) {
#if ORDER && DATA == FLOAT64
    return __longlong_as_double(x ^ ((x >> 63) & 0x7fffffffffffffffll));
#elif ORDER
    return __uint_as_float((unsigned int)(x ^ ((x >> 31) & 0x7fffffff)));
#elif ACC == FLOAT16
    return half_to_float(x);
#elif ACC == BFLOAT16
    return bfloat_to_float(x);
#else
    return (value_t)x;
#endif
}

__device__ __forceinline__ value_t scaled(value_t x, double scale) {
#if INTEGRAL
    return scale == 1.0 ? x : (value_t)((double)x * scale);
#else
    return x * (value_t)scale;
#endif
}

__device__ __forceinline__ acc_t packed(data_t x, double scale) {
#if INTEGRAL
    // A scaled integer is cut to its own type before it is widened.
    return to_acc(scale == 1.0 ? from_data(x) : from_data(to_data(scaled(from_data(x), scale))));
#else
    return to_acc(scaled(from_data(x), scale));
#endif
}

__device__ __forceinline__ data_t unpacked(acc_t x, long long divisor, double scale) {
    value_t value = from_acc(x);
    if (divisor != 1) value = value / (value_t)divisor;
    return to_data(scaled(value, scale));
}

__device__ __forceinline__ bool aligned(const void *a, int a_bytes, const void *b, int b_bytes) {
    return ((unsigned long long)a % a_bytes | (unsigned long long)b % b_bytes) == 0;
}

#define DATA_VECTOR ((int)sizeof(Vector<data_t>))
#define ACC_VECTOR ((int)sizeof(Vector<acc_t>))

// Both loops of a copy; `from` and `to` are the ends of a chunk, CONVERT makes one element of another.
#define COPY(from_t, to_t, from, to, count, is_aligned, CONVERT)                                                 \
    int done = 0;                                                                                                \
    if (is_aligned) {                                                                                            \
        const Vector<from_t> *sources = (const Vector<from_t> *)(from);                                          \
        Vector<to_t> *targets = (Vector<to_t> *)(to);                                                            \
        const int vectors = (count) / PER_VECTOR;                                                                \
        for (int base = threadIdx.x; base < vectors; base += blockDim.x * AT_ONCE) {                             \
            Vector<from_t> loaded[AT_ONCE];                                                                      \
            _Pragma("unroll") for (int k = 0; k < AT_ONCE; k++) {                                                \
                const int i = base + k * blockDim.x;                                                             \
                if (i < vectors) loaded[k].word = sources[i].word;                                               \
            }                                                                                                    \
            _Pragma("unroll") for (int k = 0; k < AT_ONCE; k++) {                                                \
                const int i = base + k * blockDim.x;                                                             \
                if (i < vectors) {                                                                               \
                    Vector<to_t> made;                                                                           \
                    _Pragma("unroll") for (int j = 0; j < PER_VECTOR; j++) {                                     \
                        const from_t x = loaded[k].element[j];                                                   \
                        made.element[j] = CONVERT;                                                               \
                    }                                                                                            \
                    targets[i].word = made.word;                                                                 \
                }                                                                                                \
            }                                                                                                    \
        }                                                                                                        \
        done = vectors * PER_VECTOR;                                                                             \
    }                                                                                                            \
    for (int i = done + threadIdx.x; i < (count); i += blockDim.x) {                                             \
        const from_t x = (from)[i];                                                                              \
        (to)[i] = CONVERT;                                                                                       \
    }

// parts: the address of each tensor.
extern "C" __global__ void pack(
    const unsigned long long *parts, const Chunk *chunks, acc_t *buffer, double scale) {
    const Chunk chunk = chunks[blockIdx.x];
    const data_t *from = (const data_t *)parts[chunk.part] + chunk.start;
    acc_t *to = buffer + chunk.at;
    const bool fits = aligned(from, DATA_VECTOR, to, ACC_VECTOR);
    COPY(data_t, acc_t, from, to, chunk.count, fits, packed(x, scale))
}

extern "C" __global__ void unpack(
    const unsigned long long *parts, const Chunk *chunks, const acc_t *buffer, long long divisor, double scale) {
    const Chunk chunk = chunks[blockIdx.x];
    const acc_t *from = buffer + chunk.at;
    data_t *to = (data_t *)parts[chunk.part] + chunk.start;
    const bool fits = aligned(from, ACC_VECTOR, to, DATA_VECTOR);
    COPY(acc_t, data_t, from, to, chunk.count, fits, unpacked(x, divisor, scale))
}
