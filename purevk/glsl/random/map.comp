#version 450
#extension GL_GOOGLE_include_directive : enable
// As elementwise/map.comp, for statements that make random numbers.
//
// Macros:
//   BODY  statements that set r (and r1, ... if there are several results)
#include "elementwise/map.glslh"
#include "random/philox.glslh"
#include "random/distributions.glslh"

#ifndef BODY
#define BODY pv_random_uniform(pv_random_bits(uint(i0 >> 2), 0u, 0u, uvec2(0u)), i0 & 3, r);
#endif

// Attempts that fail are rare: PV_ATTEMPTS of them never do.
LOOPS(loop(1000, 20))

void main() {
    uint id = MAP_ID;
    if (MAP_HAS_WORK(id)) {
        COORDINATES
        BODY
        STORE
    }
}
