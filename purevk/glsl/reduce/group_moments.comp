#version 450
#extension GL_GOOGLE_include_directive : enable
// Mean and squares of each slice of a group norm, see `group_slices.glslh`.
#include "reduce/group_slices.glslh"

WRITEONLY_BUFFER(1, moments, vec2)

// Of each channel that an invocation reads (NHWC), or of all of its elements.
#if NHWC
#define KEPT EACH
#else
#define KEPT 1
#endif
shared float means[LOCAL * KEPT];
shared float squares[LOCAL * KEPT];

LOOPS(loop(share / (AHEAD * STRIDE)) + loop(AHEAD))
#if NHWC
LOOPS(loop(ceil(GROUPS_HERE * subgroup_size, LOCAL), 2 * loop(ceil(STRIDE * inner, subgroup_size))))
#else
LOOPS(loop(ceil(GROUPS_HERE * subgroup_size, LOCAL), 2 * loop(ceil(STRIDE, subgroup_size))))
#endif

// Those of the channels of an invocation.
#if NHWC && VEC4
vec4 pivots() { return vec4(pivot_of(CHANNEL), pivot_of(CHANNEL + 1), pivot_of(CHANNEL + 2), pivot_of(CHANNEL + 3)); }
#elif NHWC
float pivots() { return pivot_of(CHANNEL); }
#else
float pivots() { return pivot_of(0); }
#endif

void main() {
    int offset = ID / LANES, first = start_of(SLICE), last = first + size_of(SLICE);
    V mean = V(0.0), square = V(0.0);
    float n = 0.0;
    V pivot = V(pivots());
    int i = offset < STRIDE ? first + offset : last;
    // The moments of some elements at a time are joined with those before (Chan, Golub and LeVeque,
    // "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
    for (; i + (AHEAD - 1) * STRIDE < last; i += AHEAD * STRIDE) {
        V some[AHEAD];
        UNROLL for (int k = 0; k < AHEAD; k++) some[k] = READ(x_offset + AT(i + k * STRIDE)) - pivot;
        V sum = some[0];
        UNROLL for (int k = 1; k < AHEAD; k++) sum += some[k];
        V middle = sum / float(AHEAD), apart = middle - mean;
        UNROLL for (int k = 0; k < AHEAD; k++) square += (some[k] - middle) * (some[k] - middle);
        float share_of_these = float(AHEAD) / (n + float(AHEAD));
        mean += apart * share_of_these;
        square += apart * apart * (n * share_of_these);
        n += float(AHEAD);
    }
    for (; i < last; i += STRIDE) {
        V v = READ(x_offset + AT(i)) - pivot, apart = v - mean;
        n += 1.0;
        mean += apart / n;
        square += apart * (v - mean);
    }
#if NHWC && VEC4
    UNROLL for (int k = 0; k < EACH; k++) {
        means[ID * EACH + k] = mean[k];
        squares[ID * EACH + k] = square[k];
    }
#elif NHWC
    means[ID] = mean;
    squares[ID] = square;
#else
    float middle = SUM(mean) / float(EACH);
    means[ID] = middle;
    squares[ID] = SUM(square) + n * SUM((mean - middle) * (mean - middle));
#endif
    barrier();
    // A subgroup joins what invocations have of a group.
#if NHWC
    int each = inner;
#else
    int each = 1;
#endif
    for (int g = int(gl_SubgroupID); g < GROUPS_HERE; g += int(gl_NumSubgroups)) {
        float sum = 0.0, all = float(last - first) * float(WEIGHT);
#define OF_GROUP(DO)                                                                                   \
    for (int k = int(gl_SubgroupInvocationID); k < STRIDE * each; k += int(gl_SubgroupSize)) {         \
        int p = k / each, at = p * (LANES * KEPT) + g * each + (k - p * each);                         \
        /* Of each of them, so many elements. */                                                       \
        float count = float((last - first - p + STRIDE - 1) / STRIDE) * float(WEIGHT / each);          \
        if (p < last - first) { DO }                                                                   \
    }
        OF_GROUP(sum += count * means[at];)
        float middle = subgroupAdd(sum) / all, deviation = 0.0;
        OF_GROUP(deviation += squares[at] + count * (means[at] - middle) * (means[at] - middle);)
        deviation = subgroupAdd(deviation);
        if (gl_SubgroupInvocationID == 0u) {
            int group = IMAGE * groups + FIRST_GROUP + g;
            buf_moments[group * slices + SLICE] = vec2(middle, deviation);
        }
    }
}
