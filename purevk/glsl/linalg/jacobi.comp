#version 450
#extension GL_GOOGLE_include_directive : enable
// Orthogonal columns of matrices, by the one-sided method of Jacobi: pairs of columns are rotated
// until all are orthogonal. Their lengths are then the singular values.
//
// A column is a row here, so that neighbouring invocations read neighbouring elements: out is
// [matrices, columns, width]. Its first `rows` elements are the column. The others are the same
// column of the product of all rotations, if there is one.
//
// Columns are in blocks of `block`. A workgroup has two blocks, and rotates all pairs of their
// columns once. The dispatch is repeated: the iterations of a sweep are the rounds of a tournament, in
// which each block meets each other one. In a workgroup an invocation has the same rows of all columns, so that only
// sums go through shared memory.
//
// Buffers: x (START), out, rotating: int, [matrices, sweeps + 1]: whether the sweep
// before rotated anything.
// Macros:
//   T       element type, float or double; HAS_FLOAT64 for the latter
//   START   1: only copies x, [matrices, columns, rows], and the identity to out, and sets `rotating`
//   PAIRS   of columns that are worked on together. Shared memory is about
//           3 * PAIRS * LOCAL elements
//   LOCAL   invocations of a workgroup, a multiple of PAIRS
//   EPSILON the distance from 1 to the next number
// Grid: a workgroup for each matrix, or for each pair of blocks of each matrix
#include "core/common.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef START
#define START 0
#endif
#ifndef LOCAL
#define LOCAL 64
#endif
#ifndef EPSILON
#define EPSILON 1.1920929e-07
#endif
#ifndef PAIRS
#define PAIRS 8
#endif
#define LANES (LOCAL / PAIRS)

PARAM(0, rows)
PARAM(1, columns)
PARAM(2, width)
PARAM(3, sweeps)
PARAM(4, matrices)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(5, out_offset)
#if START
PARAM(6, x_offset)
READONLY_BUFFER(0, x, T)
WRITEONLY_BUFFER(1, out, T)
WRITEONLY_BUFFER(2, rotating, int)
#else
PARAM(6, blocks)  // an even number
PARAM(7, block)
PUSH_CONSTANT(8, iteration)
BUFFER(0, out, T)
BUFFER(1, rotating, int)
#endif

#define NUMBER (WORKGROUP_ID.y * gl_NumWorkGroups.x + WORKGROUP_ID.x)
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

#if START
LOOPS(loop(columns, loop(ceil(width, LOCAL))) + loop(ceil(sweeps + 1, LOCAL)))
void main() {
    int id = int(gl_LocalInvocationIndex), matrix = int(NUMBER);
    if (matrix >= matrices) return;
    int x = x_offset + matrix * columns * rows, at = out_offset + matrix * columns * width;
    for (int c = 0; c < columns; c++) {
        for (int i = id; i < width; i += LOCAL) {
            buf_out[at + c * width + i] = i < rows ? buf_x[x + c * rows + i] : i - rows == c ? T(1.0) : T(0.0);
        }
    }
    for (int s = id; s <= sweeps; s += LOCAL) buf_rotating[matrix * (sweeps + 1) + s] = s == 0 ? 1 : 0;
}
#else
shared T sums[3 * PAIRS * LOCAL];
shared T sine[PAIRS], ratio[PAIRS];  // ratio is tan(angle / 2)
shared int rotated;

// Who meets in a round of a tournament of an even number of players: the last one stays, and the
// others go round.
ivec2 match_of(int meeting, int match, int players) {
    int most = players - 1;
    int one = match == 0 ? most : (meeting + match) % most;
    return ivec2(one, (meeting - match + most) % most);
}

ivec2 pair_of_blocks;

int column_of(int player) {
    int of = player < block ? pair_of_blocks.x : pair_of_blocks.y;
    return of * block + (player < block ? player : player - block);
}

LOOPS(loop(2 * block, loop(ceil(block, PAIRS), loop(ceil(rows, LOCAL)) + PAIRS * loop(ceil(width, LOCAL)))))
void main() {
    int id = int(gl_LocalInvocationIndex), pairs = blocks / 2, matrix = int(NUMBER) / pairs;
    int sweep = iteration / (blocks - 1), meeting = iteration % (blocks - 1);
    if (matrix >= matrices) return;
    int flag = matrix * (sweeps + 1) + sweep;
    // The sweep before has rotated nothing. It is the same for all invocations.
    if (buf_rotating[flag] == 0) return;
    int base = out_offset + matrix * columns * width;
    pair_of_blocks = match_of(meeting, int(NUMBER) % pairs, blocks);
    if (id == 0) rotated = 0;
    int players = 2 * block;
    for (int step = 0; step < players - 1; step++) {
        for (int first = 0; first < block; first += PAIRS) {
            int p[PAIRS], q[PAIRS];
            T a[PAIRS], b[PAIRS], d[PAIRS];
            UNROLL for (int e = 0; e < PAIRS; e++) {
                ivec2 pair = match_of(step, first + e, players);
                int left = column_of(pair.x), right = column_of(pair.y);
                bool given = first + e < block && max(left, right) < columns;
                p[e] = given ? base + min(left, right) * width : -1;
                q[e] = given ? base + max(left, right) * width : -1;
                a[e] = T(0.0);
                b[e] = T(0.0);
                d[e] = T(0.0);
            }
            for (int i = id; i < rows; i += LOCAL) {
                UNROLL for (int e = 0; e < PAIRS; e++) {
                    if (p[e] >= 0) {
                        T x = buf_out[p[e] + i], y = buf_out[q[e] + i];
                        a[e] += x * x;
                        b[e] += y * y;
                        d[e] += x * y;
                    }
                }
            }
            barrier();
            UNROLL for (int e = 0; e < PAIRS; e++) {
                sums[(3 * e + 0) * LOCAL + id] = a[e];
                sums[(3 * e + 1) * LOCAL + id] = b[e];
                sums[(3 * e + 2) * LOCAL + id] = d[e];
            }
            barrier();
            // LANES invocations add up the sums of a pair, then one of them finishes.
            int mine = id / LANES, lane = id % LANES;
            UNROLL for (int v = 0; v < 3; v++) {
                T sum = T(0.0);
                UNROLL for (int j = 0; j < PAIRS; j++) sum += sums[(3 * mine + v) * LOCAL + lane + j * LANES];
                sums[(3 * mine + v) * LOCAL + lane] = sum;
            }
            barrier();
            if (lane == 0) {
                T total[3];
                UNROLL for (int v = 0; v < 3; v++) {
                    total[v] = T(0.0);
                    UNROLL for (int j = 0; j < LANES; j++) total[v] += sums[(3 * mine + v) * LOCAL + j];
                }
                T c = T(1.0), s = T(0.0), longer = sqrt(total[0]), other = sqrt(total[1]);
                // The largest element of a matrix is about 1, so shorter columns are rounding errors.
                bool counts = min(longer, other) > T(EPSILON) * T(0.125);
                if (counts && abs(total[2]) > T(EPSILON) * longer * other) {
                    T z = (total[1] - total[0]) / (T(2.0) * total[2]);
                    T t = (z < T(0.0) ? T(-1.0) : T(1.0)) / (abs(z) + sqrt(T(1.0) + z * z));
                    c = T(1.0) / sqrt(T(1.0) + t * t);
                    s = c * t;
                    rotated = 1;
                }
                sine[mine] = s;
                ratio[mine] = s / (T(1.0) + c);
            }
            barrier();
            UNROLL for (int e = 0; e < PAIRS; e++) {
                T s = sine[e], r = ratio[e];
                if (p[e] >= 0 && s != T(0.0)) {
                    for (int i = id; i < width; i += LOCAL) {
                        T x = buf_out[p[e] + i], y = buf_out[q[e] + i];
                        // Small angles make small errors: lengths stay as they are.
                        buf_out[p[e] + i] = x - s * (y + r * x);
                        buf_out[q[e] + i] = y + s * (x - r * y);
                    }
                }
            }
        }
    }
    barrier();
    if (id == 0 && rotated != 0) buf_rotating[flag + 1] = 1;
}
#endif
