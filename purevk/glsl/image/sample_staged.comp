#version 450
#extension GL_GOOGLE_include_directive : enable
// Samples images bilinearly from shared memory. A workgroup copies COUNT channels with zeros around
// them there, and samples all PIXELS of the result from them, ROUNDS times. It reads what it will
// sample next while it samples.
//
// LANES       float, or vec2: COUNT channels
// HIGH, WIDE  the sizes of an image
// LOCAL       invocations per workgroup
// TOGETHER    samples whose reads overlap; divides those of an invocation
// LOCATE_ALL  statements that declare p2 and p3, the coordinates for i2 and i3
#include "elementwise/map.glslh"
#ifndef COUNT
#define COUNT 1
#endif
#ifndef LANES
#define LANES float
#endif
#ifndef HIGH
#define HIGH 8
#endif
#ifndef WIDE
#define WIDE 8
#endif
#ifndef PIXELS
#define PIXELS 64
#endif
#ifndef LOCAL
#define LOCAL 64
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef TOGETHER
#define TOGETHER 1
#endif
#ifndef LOCATE_ALL
#define LOCATE_ALL float p2 = float(i2), p3 = float(i3);
#endif
#ifdef BARE
const int i1 = 0, i3 = 0, r_size_3 = 8;
#undef X
#define X(n, c, y, x) buf_x[x]
#define R_PUT(n, c, y, x, v) buf_r[x] = v
#endif
#define ROW (WIDE + 2)
#define AROUND_IMAGE (2 * ROW + 2 * HIGH)  // elements with zeros
#define LOADS ((HIGH * WIDE + LOCAL - 1) / LOCAL)
#define SAMPLES ((PIXELS + LOCAL - 1) / LOCAL)
#define LOAD_AT int at = mine + n * LOCAL, y = at / WIDE, x = at - y * WIDE; if (at < HIGH * WIDE)
LOOPS(loop(ceil(AROUND_IMAGE, LOCAL)) + loop(ROUNDS, loop(SAMPLES)))

shared LANES kept[(HIGH + 2) * ROW];

LANES read(int n, int c, int y, int x) {
#if COUNT == 2
    return LANES(X(n, c, y, x), X(n, c + 1, y, x));
#else
    return LANES(X(n, c, y, x));
#endif
}

void main() {
    uint id = MAP_ID;
    COORDINATES
    int mine = i3, c = i1 * COUNT * ROUNDS;
    LANES next[LOADS];
    UNROLL for (int n = 0; n < LOADS; n++) { LOAD_AT next[n] = read(i0, c, y, x); }
    for (int at = mine; at < AROUND_IMAGE; at += LOCAL) {
        int side = at - 2 * ROW;
        kept[at < ROW ? at : at < 2 * ROW ? at + HIGH * ROW : ((side >> 1) + 1) * ROW + (side & 1) * (WIDE + 1)] = LANES(0.0);
    }
    [[dont_unroll]] for (int round = 0; round < ROUNDS; round++) {
        barrier();
        UNROLL for (int n = 0; n < LOADS; n++) { LOAD_AT kept[(y + 1) * ROW + x + 1] = next[n]; }
        barrier();
        if (round + 1 < ROUNDS) {
            UNROLL for (int n = 0; n < LOADS; n++) { LOAD_AT next[n] = read(i0, c + COUNT, y, x); }
        }
        [[dont_unroll]] for (int step = 0; step < SAMPLES; step += TOGETHER) {
            UNROLL for (int n = 0; n < TOGETHER; n++) {
                int at = mine + (step + n) * LOCAL;
                if (at < PIXELS) {
                    int i2 = at / r_size_3, i3 = at - i2 * r_size_3;
                    LOCATE_ALL
                    float f2 = floor(p2), w2 = p2 - f2, f3 = floor(p3), w3 = p3 - f3;
                    int a2 = int(f2), q20 = clamp(a2, -1, HIGH) + 1, q21 = clamp(a2 + 1, -1, HIGH) + 1;
                    int a3 = int(f3), q30 = clamp(a3, -1, WIDE) + 1, q31 = clamp(a3 + 1, -1, WIDE) + 1;
                    LANES v = (kept[q20 * ROW + q30] * (1.0 - w3) + kept[q20 * ROW + q31] * w3) * (1.0 - w2)
                        + (kept[q21 * ROW + q30] * (1.0 - w3) + kept[q21 * ROW + q31] * w3) * w2;
#if COUNT == 2
                    R_PUT(i0, c, i2, i3, v[0]);
                    R_PUT(i0, c + 1, i2, i3, v[1]);
#else
                    R_PUT(i0, c, i2, i3, v);
#endif
                }
            }
        }
        c += COUNT;
    }
}
