// Runs kernels of copying.cu on a CPU, thread by thread: included once for each pair of types, see host.py.
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim;

template <typename To, typename From> static To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
static float __uint_as_float(unsigned int x) { return bits_of<float>(x); }
static unsigned int __float_as_uint(float x) { return bits_of<unsigned int>(x); }
static long long __double_as_longlong(double x) { return bits_of<long long>(x); }
static double __longlong_as_double(long long x) { return bits_of<double>(x); }
static float host_half_to_float(unsigned short x) { return (float)bits_of<_Float16>(x); }
static unsigned short host_float_to_half(float x) { return bits_of<unsigned short>((_Float16)x); }

template <typename Kernel> static void run(int blocks, int threads, Kernel kernel) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel();
}
