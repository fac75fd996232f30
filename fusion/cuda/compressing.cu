// The inner loops of compressors: int8 with a scale for each block, signs with a scale for each block, and the
// elements of largest magnitude. Values are float32. No header is included, so that NVRTC alone is enough.
//
// Every kernel runs with THREADS threads a block. A "row" is the elements that share a scale; one thread block works
// on one row, or on one chunk of CHUNK elements where there are no scales.

#define THREADS 256
#define EACH 16
#define CHUNK (THREADS * EACH)

__device__ __forceinline__ float magnitude(float x) { return x < 0.0f ? -x : x; }

// Combines one value of each thread; all threads get the result.
#define REDUCE(kind, value, COMBINE)                                                                                 \
    shared_##kind[threadIdx.x] = value;                                                                              \
    __syncthreads();                                                                                                 \
    for (int half = THREADS / 2; half > 0; half /= 2) {                                                              \
        if (threadIdx.x < half) {                                                                                    \
            const kind a = shared_##kind[threadIdx.x], b = shared_##kind[threadIdx.x + half];                        \
            shared_##kind[threadIdx.x] = COMBINE;                                                                    \
        }                                                                                                            \
        __syncthreads();                                                                                             \
    }                                                                                                                \
    const kind reduced = shared_##kind[0];                                                                           \
    __syncthreads();

// A number in [0, 1) for an element, from a counter (Steele et al. 2014, SplitMix64, OOPSLA).
__device__ __forceinline__ float uniform(unsigned long long seed, unsigned long long index) {
    unsigned long long z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (float)((z ^ (z >> 31)) >> 40) * (1.0f / 16777216.0f);
}

// scale = largest magnitude of the row / 127; code = value / scale, rounded to nearest (seed 0) or at random.
extern "C" __global__ void quantize(
    const float *values, signed char *codes, float *scales, long long count, long long row, unsigned long long seed) {
    __shared__ float shared_float[THREADS];
    const long long begin = blockIdx.x * row, end = begin + row < count ? begin + row : count;
    float peak = 0.0f;
    for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
        const float x = magnitude(values[i]);
        // NaN is larger than all, so that it is not lost.
        if (x > peak || x != x) peak = x;
    }
    REDUCE(float, peak, b > a || b != b ? b : a)
    const float scale = reduced / 127.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
        const float steps = values[i] / divisor;
        float code = seed ? floorf(steps + uniform(seed, i)) : rintf(steps);
        code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        codes[i] = code == code ? (signed char)code : 0;
    }
}

// total += sign * scale * code, rounded once, as the compressor for CPUs has it from torch.
extern "C" __global__ void add_quantized(
    const signed char *codes, const float *scales, float *total, long long count, long long row, double sign) {
    const long long begin = blockIdx.x * row, end = begin + row < count ? begin + row : count;
    const float scale = scales[blockIdx.x] * (float)sign;
    for (long long i = begin + threadIdx.x; i < end; i += THREADS) total[i] = fmaf((float)codes[i], scale, total[i]);
}

// scale = mean magnitude of the row; one bit for each element, set where it is not negative, lowest bit first.
// A row is a multiple of 8.
extern "C" __global__ void signs(
    const float *values, unsigned char *bits, float *scales, long long count, long long row) {
    __shared__ double shared_double[THREADS];
    const long long begin = blockIdx.x * row, end = begin + row < count ? begin + row : count;
    double sum = 0.0;
    for (long long at = begin + 8 * threadIdx.x; at < end; at += 8 * THREADS) {
        unsigned int byte = 0;
        for (int k = 0; k < 8 && at + k < end; k++) {
            const float x = values[at + k];
            sum += magnitude(x);
            byte |= (unsigned int)(x >= 0.0f) << k;
        }
        bits[at / 8] = (unsigned char)byte;
    }
    REDUCE(double, sum, a + b)
    if (threadIdx.x == 0) scales[blockIdx.x] = (float)(reduced / (double)(end - begin));
}

// total += sign * scale where the bit is set, total -= sign * scale where it is not
extern "C" __global__ void add_signs(
    const unsigned char *bits, const float *scales, float *total, long long count, long long row, double sign) {
    const long long begin = blockIdx.x * row, end = begin + row < count ? begin + row : count;
    const float scale = scales[blockIdx.x] * (float)sign;
    for (long long i = begin + threadIdx.x; i < end; i += THREADS)
        total[i] += bits[i / 8] >> (i % 8) & 1 ? scale : -scale;
}

// The k largest magnitudes, exactly: their bits are found one byte after the other, by four histograms (radix
// select); then elements above the k-th are taken, and of those equal to it the first. NaN is larger than all.
struct Search {
    unsigned int prefix;  // the bits found so far
    unsigned int mask;    // which bits those are
    long long wanted;     // how many of the elements that have the prefix
};

__device__ __forceinline__ unsigned int magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

extern "C" __global__ void count_digits(
    const float *values, const Search *search, unsigned long long *histogram, long long count, long long shift) {
    __shared__ unsigned int shared_counts[256];
    shared_counts[threadIdx.x] = 0;
    __syncthreads();
    const unsigned int prefix = search->prefix, mask = search->mask;
    const long long begin = (long long)blockIdx.x * CHUNK;
    for (int k = 0; k < EACH; k++) {
        const long long i = begin + k * THREADS + threadIdx.x;
        if (i < count) {
            const unsigned int bits = magnitude_bits(values[i]);
            if ((bits & mask) == prefix) atomicAdd(&shared_counts[bits >> shift & 255u], 1u);
        }
    }
    __syncthreads();
    if (shared_counts[threadIdx.x])
        atomicAdd(&histogram[threadIdx.x], (unsigned long long)shared_counts[threadIdx.x]);
}

// One thread: which byte the k-th magnitude has, and how many are wanted of those that have it. Clears the histogram.
extern "C" __global__ void choose_digit(Search *search, unsigned long long *histogram, long long shift) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        long long wanted = search->wanted;
        int digit = 255;
        while (digit > 0 && (long long)histogram[digit] < wanted) wanted -= (long long)histogram[digit--];
        search->prefix |= (unsigned int)digit << shift;
        search->mask |= 255u << shift;
        search->wanted = wanted;
        for (int i = 0; i < 256; i++) histogram[i] = 0;
    }
}

// Of each chunk: how many elements are above the k-th magnitude, and how many equal to it.
extern "C" __global__ void count_chosen(
    const float *values, const Search *search, int *above, int *equal, long long count) {
    __shared__ int shared_int[THREADS];
    const unsigned int least = search->prefix;
    const long long begin = (long long)blockIdx.x * CHUNK;
    int mine_above = 0, mine_equal = 0;
    for (int k = 0; k < EACH; k++) {
        const long long i = begin + k * THREADS + threadIdx.x;
        if (i < count) {
            const unsigned int bits = magnitude_bits(values[i]);
            mine_above += bits > least;
            mine_equal += bits == least;
        }
    }
    {
        REDUCE(int, mine_above, a + b)
        if (threadIdx.x == 0) above[blockIdx.x] = reduced;
    }
    {
        REDUCE(int, mine_equal, a + b)
        if (threadIdx.x == 0) equal[blockIdx.x] = reduced;
    }
}

// Write indices and values, ascending. `above` and `equal` are how many elements of either kind chunks before have.
extern "C" __global__ void write_chosen(
    const float *values, const Search *search, const long long *above, const long long *equal, int *indices,
    float *chosen, long long count) {
    __shared__ int shared_above[THREADS];
    __shared__ int shared_equal[THREADS];
    const unsigned int least = search->prefix;
    const long long wanted = search->wanted;
    // Each thread has EACH neighbours, so that the order of threads is that of elements.
    const long long begin = (long long)blockIdx.x * CHUNK + threadIdx.x * EACH;
    int mine_above = 0, mine_equal = 0;
    for (int k = 0; k < EACH && begin + k < count; k++) {
        const unsigned int bits = magnitude_bits(values[begin + k]);
        mine_above += bits > least;
        mine_equal += bits == least;
    }
    shared_above[threadIdx.x] = mine_above;
    shared_equal[threadIdx.x] = mine_equal;
    __syncthreads();
    // How many there are up to each thread (Hillis and Steele 1986).
    for (int step = 1; step < THREADS; step *= 2) {
        const int a = threadIdx.x >= step ? shared_above[threadIdx.x - step] : 0;
        const int e = threadIdx.x >= step ? shared_equal[threadIdx.x - step] : 0;
        __syncthreads();
        shared_above[threadIdx.x] += a;
        shared_equal[threadIdx.x] += e;
        __syncthreads();
    }
    long long before_above = above[blockIdx.x] + shared_above[threadIdx.x] - mine_above;
    long long before_equal = equal[blockIdx.x] + shared_equal[threadIdx.x] - mine_equal;
    for (int k = 0; k < EACH && begin + k < count; k++) {
        const float x = values[begin + k];
        const unsigned int bits = magnitude_bits(x);
        if (bits > least || (bits == least && before_equal < wanted)) {
            const long long at = before_above + (before_equal < wanted ? before_equal : wanted);
            indices[at] = (int)(begin + k);
            chosen[at] = x;
        }
        before_above += bits > least;
        before_equal += bits == least;
    }
}
