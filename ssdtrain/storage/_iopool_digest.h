/* The digest of transferred bytes: CRC-32C (Castagnoli polynomial, as in iSCSI and ext4) by the processor's instruction, in three
 * lanes of words, because each instruction waits for the one before it in its lane. So any change of up to 32 adjacent bits in a
 * lane is found, and any other but for one in 2^32 or more. Without the instruction the same numbers come from tables. */
#ifndef SSDTRAIN_IOPOOL_DIGEST_H
#define SSDTRAIN_IOPOOL_DIGEST_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_iopool_faults.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82F63B78u /* bits reversed */

static uint32_t crc_table[8][256];
static atomic_int by_instruction; /* of the processor; see `prepare_digests` */

static inline uint64_t word_at(const char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline uint32_t crc_byte_by_table(uint32_t crc, unsigned char byte) {
    return crc >> 8 ^ crc_table[0][(crc ^ byte) & 255];
}

static inline uint32_t crc_word_by_table(uint32_t crc, uint64_t word) {
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; i++) crc ^= crc_table[7 - i][word >> 8 * i & 255];
    return crc;
}

/* The three lanes over `count` bytes; what is left of them goes into the first one. */
#define CRC_LANES(name, attribute, word, byte)                           \
    attribute static void name(uint32_t lane[3], const char *bytes, size_t count) { \
        uint32_t a = lane[0], b = lane[1], c = lane[2];                  \
        for (; count >= 24; bytes += 24, count -= 24) {                  \
            a = word(a, word_at(bytes));                                 \
            b = word(b, word_at(bytes + 8));                             \
            c = word(c, word_at(bytes + 16));                            \
        }                                                                \
        for (; count; count--) a = byte(a, (unsigned char)*bytes++);     \
        lane[0] = a, lane[1] = b, lane[2] = c;                           \
    }

CRC_LANES(crc_by_table, , crc_word_by_table, crc_byte_by_table)

#if defined(__x86_64__)
#define CRC_WORD(crc, word) ((uint32_t)__builtin_ia32_crc32di(crc, word))
#define CRC_BYTE(crc, byte) ((uint32_t)__builtin_ia32_crc32qi(crc, byte))
CRC_LANES(crc_by_instruction, __attribute__((target("sse4.2"))), CRC_WORD, CRC_BYTE)
static int has_instruction(void) { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
#define CRC_ARM(instruction, width, crc, value) ({                                                            \
    uint32_t sum;                                                                                             \
    __asm__(".arch_extension crc\n\t" instruction " %w0, %w1, %" width "2" : "=r"(sum) : "r"(crc), "r"(value)); \
    sum;                                                                                                      \
})
#define CRC_WORD(crc, word) CRC_ARM("crc32cx", "x", crc, word)
#define CRC_BYTE(crc, byte) CRC_ARM("crc32cb", "w", crc, (uint32_t)(byte))
CRC_LANES(crc_by_instruction, , CRC_WORD, CRC_BYTE)
static int has_instruction(void) { return (getauxval(AT_HWCAP) & (1 << 7)) != 0; } /* HWCAP_CRC32 */
#else
#define crc_by_instruction crc_by_table
static int has_instruction(void) { return 0; }
#endif

/* Once, before the first digest. */
static void prepare_digests(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        crc_table[0][i] = crc;
    }
    for (int of = 1; of < 8; of++)
        for (int i = 0; i < 256; i++) crc_table[of][i] = crc_byte_by_table(crc_table[of - 1][i], 0);
    atomic_store(&by_instruction, has_instruction());
}

/* The digest of mapped bytes, after that of the bytes before them. */
static uint64_t digest_bytes(uint64_t before, const char *bytes, size_t count) {
    uint32_t lane[3] = {~0u, ~0u, ~0u};
    if (atomic_load(&by_instruction)) crc_by_instruction(lane, bytes, count);
    else crc_by_table(lane, bytes, count);
    return mix(mix(before ^ (lane[0] | (uint64_t)lane[1] << 32)) ^ lane[2] ^ (uint64_t)count << 32);
}

#endif
