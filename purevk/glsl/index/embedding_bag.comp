#version 450
#extension GL_GOOGLE_include_directive : enable
// The sum, mean or maximum of rows of a table: column i1 of bag i0. Bag i0 starts at entry START(i0).
//
// MODE     0: sum, 1: mean, 2: maximum, R1 the row that it is from
// TO_OFFSET  1: the last sum ends at the last offset, but the mean counts all entries
// TERM(e, m)  what entry m adds, for row e of the table
#include "elementwise/map.glslh"
#ifndef MODE
#define MODE 0
#endif
#ifndef TO_OFFSET
#define TO_OFFSET 0
#endif
#ifndef TERM
#define TERM(e, m) TABLE(e, i1)
#endif
#ifdef BARE
const int count = 1, last = 0, padding = -1, table_size_0 = 1, i1 = 0;
#define START(i) buf_x[i]
#define INDEX(m) buf_x[m]
#define TABLE(e, c) buf_x[e]
#else
LOOPS(loop(count))
#endif

MAP_BEGIN
int from = max(int(START(i0)), 0), to = i0 < last ? min(int(START(i0 + 1)), count) : count;
#if TO_OFFSET
int stop = min(to, int(START(i0 + 1)));
#else
int stop = to;
#endif
int n = 0;
r = 0.0;
#if MODE == 2
r1 = 0;
#endif
for (int m = from; m < to; m++) {
    int e = int(INDEX(m));
    if (padding >= 0 && e == padding) continue;
    n++;
    if (m >= stop) continue;
    e = pv_index(e, table_size_0);
#if MODE == 2
    NUMBER v = TERM(e, m);
    if (n == 1 || v > r) {
        r = v;
        r1 = e;
    }
#else
    r += TERM(e, m);
#endif
}
#if MODE == 1
if (n > 0) r /= NUMBER(n);
#endif
MAP_END
