/* The processor's matrix unit (Intel AMX) for bfloat16: eight registers, each a tile of up to 16 rows of 64 bytes. */

#pragma once

#include "vectors.h"

#if defined __AMX_BF16__ && defined __AVX512BF16__ && defined __linux__
#define HAVE_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE = 16,       /* rows of a tile, and numbers of 32 bits in one of them */
    DEPTH = 32,      /* bfloat16 in one: what a product sums over */
    TILE_BYTES = 1024,
    ALLOW = 0x1023,  /* arch_prctl: ARCH_REQ_XCOMP_PERM, */
    TILE_DATA = 18,  /* for this state */
};

/* Rows of each register, and bytes of a row. */
static void configure_tiles(const int rows[8], const int bytes[8]) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.rows[i] = rows[i], config.bytes[i] = bytes[i];
    __asm__ volatile("" : : "r"(&config) : "memory"); /* GCC 12 thinks that only the first bytes are read */
    _tile_loadconfig(&config);
}

/* Whether this process may use the unit: the system gives it to those who ask. */
int kvproof_may_use_tiles(void) { return syscall(SYS_arch_prctl, ALLOW, TILE_DATA) == 0; }

#else
int kvproof_may_use_tiles(void) { return 0; }
#endif
