#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if defined(BFLOAT16) && BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#endif
// softmax(scale * q k^T + mask) v of 16 bits on matrix cores, in one pass with a running maximum.
// Scores, their softmax and the sums are float. Scores and sums stay in a subgroup's fragments,
// whose elements are in the order that fragments.glslh states; the device must have been tested for
// that. The scores are then in the right order for the left operand of the second matmul.
//
// With MASK_WORDS, the keys of a step are in shared memory in another order than in memory, in which
// those of an invocation's scores are neighbours: KEYS / 4 of them, which the four invocations of a
// row share out. So an invocation reads many elements of the mask at a time, one step ahead.
//
// Buffers, parameters and macros: attention_io.glslh; q, k and v are all float16, or all bfloat16.
// Heads are padded with zeros to multiples of 16 columns. More macros:
//   BFLOAT16  with COOPMAT, 1: they are bfloat16. Needs a compiler that knows GL_EXT_bfloat16. (0)
//   FRAGMENTS_M  fragments of 16 queries per subgroup (1)
//   FRAGMENT_N  columns of the right fragments: 8 or 16, what the device has (8)
//   BLOCKS_OUT  1: out is a matrix [B * S, Hq * VALUE_DIM] in the order of fragments
//     (fragment_blocks.glslh). VALUE_DIM is a multiple of 16 (0)
//   REVERSED  1: the workgroups of the last queries start first, where these see the most keys (0)
//   SUBS  subgroups per workgroup (4)
//   KEYS  keys per step (32), a multiple of 16; times the columns of a padded head, of k and of v, a
//     multiple of 128 * SUBS
//   VEC8_KV  with COOPMAT, 1: k and v are read 8 elements at a time. HEAD_DIM, VALUE_DIM and the strides
//     and offsets of k and v are multiples of 8, and KEYS times the columns of a padded head is a
//     multiple of 256 * SUBS.
//   Q_STEPS  steps of 16 columns of the queries that are in shared memory, the first ones; the others
//     are in registers. With COOPMAT, VEC8_KV is 1 and HEAD_DIM a multiple of 8 if it is not 0. (0)
//   COOPMAT  0: the same arithmetic step by step, for tests on devices without matrix cores,
//     with any element type
// Shared memory, bytes: 2 * KEYS * (HEAD_DIM + VALUE_DIM + 16), with padded heads, if Q_STEPS is not
//   0 32 * FRAGMENTS_M * SUBS * (16 * Q_STEPS + 8) more, and that of steps.glslh
// Grid: (ceil(S / (16 * FRAGMENTS_M * SUBS)), Hq, B)
#include "core/common.glslh"
#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#ifndef BLOCKS_OUT
#define BLOCKS_OUT 0
#endif
#if BLOCKS_OUT
#include "matmul/fragment_blocks.glslh"
#endif
#ifndef FRAGMENTS_M
#define FRAGMENTS_M 1
#endif
#ifndef SUBS
#define SUBS 4
#endif
#ifndef KEYS
#define KEYS 32
#endif
#ifndef REVERSED
#define REVERSED 0
#endif
#ifndef Q_STEPS
#define Q_STEPS 0
#endif

#include "attention/attention_io.glslh"
#include "core/fragments.glslh"
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
#define LOCAL (32 * SUBS)
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;
#define SUB_QUERIES (16 * FRAGMENTS_M)
#define QUERIES (SUB_QUERIES * SUBS)
#include "attention/steps.glslh"

#define WIDTH ((HEAD_DIM + 15) / 16 * 16)
#define VALUE_WIDTH ((VALUE_DIM + 15) / 16 * 16)
// Rows are padded by 8, so that neighbouring rows are in different banks.
#define KEY_LINE (WIDTH + 8)
#define VALUE_LINE (VALUE_WIDTH + 8)
#define TILE_V (KEYS * KEY_LINE)
#define TILE_Q (TILE_V + KEYS * VALUE_LINE)
#define Q_LINE (16 * Q_STEPS + 8)
#if Q_STEPS
#define TILES_SIZE (TILE_Q + QUERIES * Q_LINE)
#else
#define TILES_SIZE TILE_Q
#endif
#define STEPS_D (WIDTH / 16)
#define KEYS8 (KEYS / 8)
#define VALUES8 (VALUE_WIDTH / 8)
#define KEYS_N (KEYS / FRAGMENT_N)
#define VALUES_N (VALUE_WIDTH / FRAGMENT_N)
// Elements of a load of k or v.
#define EACH (4 + 4 * VEC8_KV)
#define VECTORS_K (WIDTH / EACH)
#define VECTORS_V (VALUE_WIDTH / EACH)
#define K_SLOTS (KEYS * VECTORS_K / LOCAL)
#define V_SLOTS (KEYS * VECTORS_V / LOCAL)

#if COOPMAT
#define SUB int(gl_SubgroupID)
#define LANE int(gl_SubgroupInvocationID)
#if BFLOAT16
#define LOADED bfloat16_t
#else
#define LOADED float16_t
#endif
#if VEC8_KV
#define LOADED_VECTOR uvec4
#else
#define LOADED_VECTOR QUAD_OF(T_K)
#endif
#define FETCHED(T, v) LOADED_VECTOR(v)
#define LEFT(name) coopmat<LOADED, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> name
#define SUMS(name) coopmat<float, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator> name
#define CLEAR(sums) sums = coopmat<float, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseAccumulator>(0.0)
shared LOADED_VECTOR tiles[TILES_SIZE / EACH];

// The right operand, 16 x FRAGMENT_N, for MULTIPLY: keys, whose columns are rows of the tile, or values,
// whose rows are.
#define RIGHT_KEYS(at) coopmat<LOADED, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseB> right; \
    coopMatLoad(right, tiles, (at) / EACH, KEY_LINE / EACH, gl_CooperativeMatrixLayoutColumnMajor)
#define RIGHT_VALUES(at) coopmat<LOADED, gl_ScopeSubgroup, 16, FRAGMENT_N, gl_MatrixUseB> right; \
    coopMatLoad(right, tiles, (at) / EACH, VALUE_LINE / EACH, gl_CooperativeMatrixLayoutRowMajor)
#define MULTIPLY(sums, left) sums = coopMatMulAdd(left, right, sums)
#define LOAD_LEFT(left, at) \
    coopMatLoad(left, tiles, (at) / EACH, Q_LINE / EACH, gl_CooperativeMatrixLayoutRowMajor)
#else
#define SUB int(gl_LocalInvocationIndex / 32u)
#define LANE int(gl_LocalInvocationIndex % 32u)
#define LOADED float
#define LOADED_VECTOR vec4
#define FETCHED(T, v) FLOATS_OF(T, v)
#define LEFT(name) float name[8]
#define SUMS(name) float name[FRAGMENT_N / 2]
#define CLEAR(sums) UNROLL for (int i = 0; i < FRAGMENT_N / 2; i++) sums[i] = 0.0
shared float tiles[TILES_SIZE];
shared float lefts[LOCAL * 8];

#define RIGHT_KEYS(at) ivec3 right = ivec3(at, 1, KEY_LINE)
#define RIGHT_VALUES(at) ivec3 right = ivec3(at, VALUE_LINE, 1)
#define MULTIPLY(sums, left) multiply(sums, left, right)
#define LOAD_LEFT(left, at) UNROLL for (int i = 0; i < 8; i++) \
    left[i] = tiles[(at) + A_ROW(LANE, i / 2) * Q_LINE + A_COLUMN(LANE, i / 2) + i % 2]
// Multiplies a fragment by the elements of the tiles from right.x on, in steps of y along rows and
// z along columns, and adds the result.
void multiply(inout float sums[FRAGMENT_N / 2], float left[8], ivec3 right) {
    barrier();
    UNROLL for (int i = 0; i < 8; i++) lefts[(SUB * 32 + LANE) * 8 + i] = left[i];
    barrier();
    UNROLL for (int i = 0; i < FRAGMENT_N / 2; i++) {
        int row = SUM_ROW(LANE, i), column = SUM_COLUMN(LANE, i);
        for (int k = 0; k < 16; k++) {
            float held = lefts[(SUB * 32 + row % 8 * 4 + k % 8 / 2) * 8 + row / 8 * 4 + k / 8 * 2 + k % 2];
            sums[i] += held * tiles[right.x + k * right.y + column * right.z];
        }
    }
}
#endif

#if MASK_WORDS
#define KEYS_EACH (KEYS / 4)
// The row of the tile that holds a key of a step, and the key of element i of 8 columns of scores.
#define TILE_ROW(key) ((key) % KEYS_EACH / 2 * 8 + (key) / KEYS_EACH * 2 + (key) % 2)
#define KEY8(lane, block, i) ((lane) % 4 * KEYS_EACH + 2 * (block) + (i) % 2)
#define MASK_BYTES_float16_t 2
#define MASK_BYTES_uint16_t 2
#define MASK_BYTES_uint8_t 1
#define MASK_BYTES_PASTE(T) MASK_BYTES_##T
#define MASK_BYTES_OF(T) MASK_BYTES_PASTE(T)
#define MASK_EACH (4 * MASK_WORDS / MASK_BYTES_OF(T_MASK))  // elements of a load
#define MASK_LOADS (KEYS_EACH / MASK_EACH)
#define MASK_HELD (MASK_LOADS * MASK_WORDS)
// Element i of a row's words.
#if COOPMAT
#define MASK_OF_float16_t(words, i) float(unpackFloat2x16(words[(i) / 2])[(i) % 2])
#else
#define MASK_OF_float16_t(words, i) unpackHalf2x16(words[(i) / 2])[(i) % 2]
#endif
#define MASK_OF_uint16_t(words, i) uintBitsToFloat((i) % 2 == 0 ? words[(i) / 2] << 16 : words[(i) / 2] & 0xffff0000u)
#define MASK_OF_uint8_t(words, i) (words[(i) / 4] >> 8 * ((i) % 4) & 0xffu)
#define MASK_OF_PASTE(T, words, i) MASK_OF_##T(words, i)
#define MASK_OF(T, words, i) MASK_OF_PASTE(T, words, i)
#else
#define TILE_ROW(key) (key)
#define KEY8(lane, block, i) (8 * (block) + COLUMN8(lane, i))
#endif

// Element i (0 .. 3) of 8 columns of scores or of sums.
#define OF8(fragments, block, i) fragments[(block) * 8 / FRAGMENT_N][SUM8(block, i)]

// Scores are multiples of log 2, unless a mask or a function makes them, which may be the lowest
// floats.
#if MASK == 1 || SCORED
#define UNIT 1.0
#define POWER exp
#else
#define UNIT 1.44269504
#define POWER exp2
#endif

// A weight as an element of the left operand. It is not negative, and where it is NaN, so is the
// total.
#if COOPMAT && BFLOAT16
#define WEIGHT(p) LOADED(uintBitsToFloat((floatBitsToUint(p) + 0x8000u) & 0xffff0000u))
#else
#define WEIGHT(p) LOADED(p)
#endif

LOADED_VECTOR next_k[K_SLOTS], next_v[V_SLOTS];

void fetch(int base_k, int base_v, int t0) {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int s = 0; s < K_SLOTS; s++) {
        int at = id + s * LOCAL, column = at % VECTORS_K, row = base_k + row_of(min(t0 + at / VECTORS_K, T - 1)) * k_row;
        next_k[s] = LOADED_VECTOR(0.0);
        if (column < HEAD_DIM / EACH) next_k[s] = FETCHED(T_K, buf_k[row / EACH + column]);
    }
    UNROLL for (int s = 0; s < V_SLOTS; s++) {
        int at = id + s * LOCAL, column = at % VECTORS_V, row = base_v + row_of(min(t0 + at / VECTORS_V, T - 1)) * v_row;
        next_v[s] = LOADED_VECTOR(0.0);
        if (column < VALUE_DIM / EACH) next_v[s] = FETCHED(T_V, buf_v[row / EACH + column]);
    }
}

// Stores a vector at an element's place.
#if COOPMAT
#define PUT(at, v) tiles[(at) / EACH] = v
#else
#define PUT(at, v) UNROLL for (int c = 0; c < 4; c++) tiles[(at) + c] = v[c]
#endif

void put() {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int s = 0; s < K_SLOTS; s++) {
        int i = id + s * LOCAL;
        PUT(TILE_ROW(i / VECTORS_K) * KEY_LINE + i % VECTORS_K * EACH, next_k[s]);
    }
    UNROLL for (int s = 0; s < V_SLOTS; s++) {
        int i = id + s * LOCAL;
        PUT(TILE_V + TILE_ROW(i / VECTORS_V) * VALUE_LINE + i % VECTORS_V * EACH, next_v[s]);
    }
}

#if MASK_WORDS
// The mask of query s and of this invocation's keys of the step from key t0 on.
void read_mask(out uint words[MASK_HELD], int base_mask, int s, int t0) {
    int row = base_mask + min(s, S - 1) * mask_row, t = t0 + LANE % 4 * KEYS_EACH;
    UNROLL for (int n = 0; n < MASK_LOADS; n++) {
        int at = (row + min(t + n * MASK_EACH, T - MASK_EACH)) / MASK_EACH;
#if MASK_WORDS == 1
        words[n] = buf_mask[at];
#else
        UNROLL for (int w = 0; w < MASK_WORDS; w++) words[n * MASK_WORDS + w] = buf_mask[at][w];
#endif
    }
}
#endif

#if Q_STEPS
// The queries of this workgroup, from `first` on, into shared memory.
void put_queries(int base_q, int first) {
    for (int i = int(gl_LocalInvocationIndex); i < QUERIES * 2 * Q_STEPS; i += LOCAL) {
        int row = i / (2 * Q_STEPS), column = i % (2 * Q_STEPS) * 8, at = base_q + min(first + row, S - 1) * q_row + column;
        int to = TILE_Q + row * Q_LINE + column;
        vec4 low = vec4(0.0), high = vec4(0.0);
        if (column < HEAD_DIM) low = READ4_Q(at);
        if (column + 4 < HEAD_DIM) high = READ4_Q(at + 4);
#if COOPMAT && BFLOAT16
        tiles[to / 8] = uvec4(pv_bfloat16_words(low), pv_bfloat16_words(high));
#elif COOPMAT
        tiles[to / 8] = uvec4(packHalf2x16(low.xy), packHalf2x16(low.zw), packHalf2x16(high.xy), packHalf2x16(high.zw));
#else
        PUT(to, low);
        PUT(to + 4, high);
#endif
    }
}
#endif

LOOPS(loop(ceil(QUERIES * 2 * Q_STEPS, LOCAL)) + STEP_KEYS_LOOPS + NEXT_STEP_LOOPS)
LOOPS(loop(ceil(T, KEYS), NEXT_STEP_LOOPS_EACH + 16))

void main() {
    begin_functions();
    int head = int(WORKGROUP_ID.y), batch = int(WORKGROUP_ID.z), key_head = head / group, lane = LANE;
    int base_q = offset_q + batch * q_batch + head * q_head;
    int base_k = offset_k + batch * k_batch + key_head * k_head;
    int base_v = offset_v + batch * v_batch + key_head * v_head;
    int base_o = offset_o + batch * o_batch + head * o_head;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;
#if REVERSED
    int first = ((S - 1) / QUERIES - int(WORKGROUP_ID.x)) * QUERIES, row0 = first + SUB * SUB_QUERIES;
#else
    int first = int(WORKGROUP_ID.x) * QUERIES, row0 = first + SUB * SUB_QUERIES;
#endif

    ivec2 ends = step_keys(first), shown = ivec2(common_first[SUB], common_last[SUB]);
    int keys = ends.y, next = next_step(ends.x, keys, first);
    if (next < keys) fetch(base_k, base_v, next);
    LEFT(q[FRAGMENTS_M][STEPS_D > Q_STEPS ? STEPS_D - Q_STEPS : 1]);
#if Q_STEPS
    put_queries(base_q, first);
#endif
    SUMS(sums[FRAGMENTS_M][VALUES_N]);
    float highest[FRAGMENTS_M][2], total[FRAGMENTS_M][2];
    ivec2 seen[FRAGMENTS_M][2];
    UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
        UNROLL for (int d = Q_STEPS; d < STEPS_D; d++) {
            UNROLL for (int i = 0; i < 4; i++) {
                int column = 16 * d + A_COLUMN(lane, i);
                int at = base_q + min(row0 + 16 * m + A_ROW(lane, i), S - 1) * q_row + column;
                vec4 quad = vec4(0.0);
                if (column < HEAD_DIM) quad = READ4_Q(at);
                q[m][d - Q_STEPS][2 * i] = LOADED((lane & 1) == 0 ? quad.x : quad.z);
                q[m][d - Q_STEPS][2 * i + 1] = LOADED((lane & 1) == 0 ? quad.y : quad.w);
            }
        }
        UNROLL for (int v = 0; v < VALUES_N; v++) CLEAR(sums[m][v]);
        UNROLL for (int h = 0; h < 2; h++) {
            highest[m][h] = UNSEEN;
            total[m][h] = 0.0;
            seen[m][h] = keys_of(row0 + 16 * m + ROW8(lane, 2 * h));
        }
    }
#if MASK_WORDS
    uint next_mask[FRAGMENTS_M][2][MASK_HELD];
    UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
        UNROLL for (int h = 0; h < 2; h++) {
            if (next < keys) read_mask(next_mask[m][h], base_mask, row0 + 16 * m + ROW8(lane, 2 * h), next);
        }
    }
#endif
    ROLL while (next < keys) {
        int t0 = next;
        barrier();
        put();
        barrier();
        next = next_step(t0 + KEYS, keys, first);
        if (next < keys) fetch(base_k, base_v, next);
#if MASK_WORDS
        uint mask[FRAGMENTS_M][2][MASK_HELD];
        UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
            UNROLL for (int h = 0; h < 2; h++) {
                mask[m][h] = next_mask[m][h];
                read_mask(next_mask[m][h], base_mask, row0 + 16 * m + ROW8(lane, 2 * h), next);
            }
        }
#endif
        SUMS(scores[FRAGMENTS_M][KEYS_N]);
#if Q_STEPS
        UNROLL for (int j = 0; j < KEYS_N; j++) {
            UNROLL for (int m = 0; m < FRAGMENTS_M; m++) CLEAR(scores[m][j]);
        }
        UNROLL for (int d = 0; d < Q_STEPS; d++) {
            LEFT(left[FRAGMENTS_M]);
            UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
                LOAD_LEFT(left[m], TILE_Q + (SUB * SUB_QUERIES + 16 * m) * Q_LINE + 16 * d);
            }
            UNROLL for (int j = 0; j < KEYS_N; j++) {
                RIGHT_KEYS(FRAGMENT_N * j * KEY_LINE + 16 * d);
                UNROLL for (int m = 0; m < FRAGMENTS_M; m++) MULTIPLY(scores[m][j], left[m]);
            }
        }
#endif
        UNROLL for (int j = 0; j < KEYS_N; j++) {
            if (Q_STEPS == 0) {
                UNROLL for (int m = 0; m < FRAGMENTS_M; m++) CLEAR(scores[m][j]);
            }
            UNROLL for (int d = Q_STEPS; d < STEPS_D; d++) {
                RIGHT_KEYS(FRAGMENT_N * j * KEY_LINE + 16 * d);
                UNROLL for (int m = 0; m < FRAGMENTS_M; m++) MULTIPLY(scores[m][j], q[m][d - Q_STEPS]);
            }
        }
        // Whether the queries see all keys of this step, as far as CAUSAL, LIMITS and functions tell.
        bool whole = MASKED == 0 && t0 >= shown.x && t0 + KEYS <= shown.y;
        UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
            float unit = intBitsToFloat(scale_bits) * UNIT, factor = 1.0;
            if (SCORED == 0 && MASK != 1 && unit > 0.0) {
                factor = unit;  // scores are multiplied where they are used
            } else {
                UNROLL for (int j = 0; j < KEYS8; j++) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        int s = row0 + 16 * m + ROW8(lane, i), t = t0 + KEY8(lane, j, i);
                        OF8(scores[m], j, i) = scaled_score(OF8(scores[m], j, i), s, t) * UNIT;
                    }
                }
            }
#if MASK
            UNROLL for (int j = 0; j < KEYS8; j++) {
                UNROLL for (int i = 0; i < 4; i++) {
#if MASK_WORDS
#define MASK_HERE MASK_OF(T_MASK, mask[m][i / 2], 2 * j + i % 2)
#else
                    int s = min(row0 + 16 * m + ROW8(lane, i), S - 1), t = min(t0 + KEY8(lane, j, i), T - 1);
#define MASK_HERE READ_MASK(base_mask + s * mask_row + t * mask_column)
#endif
#if MASK == 1
                    OF8(scores[m], j, i) += MASK_HERE;
#else
                    if (MASK_HERE == 0u) OF8(scores[m], j, i) = UNSEEN;
#endif
                }
            }
#endif
            if (!whole) {
                UNROLL for (int j = 0; j < KEYS8; j++) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        int s = row0 + 16 * m + ROW8(lane, i), t = t0 + KEY8(lane, j, i);
                        ivec2 few = seen[m][i / 2];
                        if (t < few.x || t >= few.y || !is_seen(s, t)) OF8(scores[m], j, i) = UNSEEN;
                    }
                }
            }
            float shrink[2], base[2];
            UNROLL for (int h = 0; h < 2; h++) {
                float top = max(OF8(scores[m], 0, 2 * h), OF8(scores[m], 0, 2 * h + 1));
                UNROLL for (int j = 1; j < KEYS8; j++) {
                    top = max(top, max(OF8(scores[m], j, 2 * h), OF8(scores[m], j, 2 * h + 1)));
                }
                top = max(highest[m][h], top * factor);
                top = max(top, subgroupShuffleXor(top, 1u));
                top = max(top, subgroupShuffleXor(top, 2u));
                base[h] = top == UNSEEN ? 0.0 : top;
                shrink[h] = POWER(highest[m][h] - base[h]);
                highest[m][h] = top;
                total[m][h] *= shrink[h];
                UNROLL for (int j = 0; j < KEYS8; j++) {
                    UNROLL for (int e = 0; e < 2; e++) {
                        float p = POWER(fma(OF8(scores[m], j, 2 * h + e), factor, -base[h]));
                        OF8(scores[m], j, 2 * h + e) = p;
                        total[m][h] += p;
                    }
                }
            }
            UNROLL for (int v = 0; v < VALUES8; v++) {
                UNROLL for (int i = 0; i < 4; i++) OF8(sums[m], v, i) *= shrink[i / 2];
            }
        }
        UNROLL for (int j = 0; j < KEYS8 / 2; j++) {
            LEFT(p[FRAGMENTS_M]);
            UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
                UNROLL for (int i = 0; i < 4; i++) {
                    p[m][2 * i] = WEIGHT(OF8(scores[m], 2 * j + i % 2, i / 2 * 2));
                    p[m][2 * i + 1] = WEIGHT(OF8(scores[m], 2 * j + i % 2, i / 2 * 2 + 1));
                }
            }
            UNROLL for (int v = 0; v < VALUES_N; v++) {
                RIGHT_VALUES(TILE_V + 16 * j * VALUE_LINE + FRAGMENT_N * v);
                UNROLL for (int m = 0; m < FRAGMENTS_M; m++) MULTIPLY(sums[m][v], p[m]);
            }
        }
    }
    // Neighbours hold two columns each of two rows: the even one takes the first row, the odd one
    // the second.
    bool odd = (lane & 1) != 0;
    UNROLL for (int m = 0; m < FRAGMENTS_M; m++) {
        int row = row0 + 16 * m + ROW8(lane, 0) + (odd ? 8 : 0);
        float over[2];
        UNROLL for (int h = 0; h < 2; h++) {
            float all = total[m][h] + subgroupShuffleXor(total[m][h], 1u);
            all += subgroupShuffleXor(all, 2u);
            over[h] = over_total(all, highest[m][h] / UNIT, batch, head, row0 + 16 * m + ROW8(lane, 2 * h));
        }
        UNROLL for (int v = 0; v < VALUES8; v++) {
            vec2 upper = over[0] * vec2(OF8(sums[m], v, 0), OF8(sums[m], v, 1));
            vec2 lower = over[1] * vec2(OF8(sums[m], v, 2), OF8(sums[m], v, 3));
            vec2 other = odd ? upper : lower;
            other = vec2(subgroupShuffleXor(other.x, 1u), subgroupShuffleXor(other.y, 1u));
            int quad = 2 * v + lane % 4 / 2;
            if (row < S && quad < DV4) {
#if BLOCKS_OUT
                int columns = int(gl_NumWorkGroups.y) * VALUE_DIM;
                int at = offset_o + BLOCK_ELEMENT(batch * S + row, head * VALUE_DIM + 4 * quad, columns);
#else
                int at = base_o + row * o_row + 4 * quad;
#endif
                buf_out[at / 4] = QUAD_FROM(T_OUT, (odd ? vec4(other, lower) : vec4(upper, other)));
            }
        }
    }
}
