// FarmHash Fingerprint64 of one byte string: `farmhashna::Hash64` of https://github.com/google/farmhash (MIT licence, Google Inc., 2014).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace farmhash {

constexpr uint64_t K0 = 0xc3a5c85c97cb3127u, K1 = 0xb492b66fbe98f273u, K2 = 0x9ae16a3b2f90404fu;

inline uint64_t fetch64(const uint8_t *p) {
    uint64_t word;
    std::memcpy(&word, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

inline uint64_t fetch32(const uint8_t *p) {
    return p[0] | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
}

inline uint64_t rotate(uint64_t value, int bits) { return value >> bits | value << (64 - bits); }
inline uint64_t shift_mix(uint64_t value) { return value ^ value >> 47; }

inline uint64_t hash16(uint64_t u, uint64_t v, uint64_t mul) {
    return shift_mix((v ^ shift_mix((u ^ v) * mul)) * mul) * mul;
}

inline uint64_t hash8to16(uint64_t first, uint64_t last, size_t length) {
    const uint64_t mul = K2 + length * 2, a = first + K2;
    return hash16(rotate(last, 37) * mul + a, (rotate(a, 25) + last) * mul, mul);
}

// A string of exactly eight bytes, given as its little-endian word.
inline uint64_t hash8(uint64_t word) { return hash8to16(word, word, 8); }

inline uint64_t hash17to32(const uint8_t *s, size_t length) {
    const uint64_t mul = K2 + length * 2, a = fetch64(s) * K1, b = fetch64(s + 8);
    const uint64_t c = fetch64(s + length - 8) * mul, d = fetch64(s + length - 16) * K2;
    return hash16(rotate(a + b, 43) + rotate(c, 30) + d, a + rotate(b + K2, 18) + c, mul);
}

inline uint64_t hash33to64(const uint8_t *s, size_t length) {
    const uint64_t mul = K2 + length * 2, a = fetch64(s) * K2, b = fetch64(s + 8);
    const uint64_t c = fetch64(s + length - 8) * mul, d = fetch64(s + length - 16) * K2;
    const uint64_t y = rotate(a + b, 43) + rotate(c, 30) + d;
    const uint64_t z = hash16(y, a + rotate(b + K2, 18) + c, mul);
    const uint64_t e = fetch64(s + 16) * mul, f = fetch64(s + 24);
    const uint64_t g = (y + fetch64(s + length - 32)) * mul, h = (z + fetch64(s + length - 24)) * mul;
    return hash16(rotate(e + f, 43) + rotate(g, 30) + h, e + rotate(f + a, 18) + g, mul);
}

struct Pair {
    uint64_t first, second;
};

inline Pair weak_hash32(const uint8_t *s, uint64_t a, uint64_t b) {
    a += fetch64(s);
    b = rotate(b + a + fetch64(s + 24), 21);
    const uint64_t c = a;
    a += fetch64(s + 8) + fetch64(s + 16);
    return {a + fetch64(s + 24), b + rotate(a, 44) + c};
}

inline uint64_t hash_over_64(const uint8_t *s, size_t length) {
    uint64_t x = 81 * K2 + fetch64(s), y = 81 * K1 + 113, z = shift_mix(y * K2 + 113) * K2;
    Pair v{0, 0}, w{0, 0};
    // 64 bytes into the state; `nine` is 9 for the last 64 bytes and 1 before.
    const auto mix = [&](const uint8_t *p, uint64_t mul, uint64_t nine) {
        x = rotate(x + y + v.first + fetch64(p + 8), 37) * mul;
        y = rotate(y + v.second + fetch64(p + 48), 42) * mul;
        x ^= w.second * nine;
        y += v.first * nine + fetch64(p + 40);
        z = rotate(z + w.first, 33) * mul;
        v = weak_hash32(p, v.second * mul, x + w.first);
        w = weak_hash32(p + 32, z + w.second, y + fetch64(p + 16));
        const uint64_t swapped = z;
        z = x;
        x = swapped;
    };
    for (size_t done = 0; done < (length - 1) / 64 * 64; done += 64)
        mix(s + done, K1, 1);
    const uint64_t mul = K1 + ((z & 0xff) << 1);
    w.first += (length - 1) & 63;
    v.first += w.first;
    w.first += v.first;
    mix(s + length - 64, mul, 9);
    return hash16(hash16(v.first, w.first, mul) + shift_mix(y) * K0 + z, hash16(v.second, w.second, mul) + x, mul);
}

inline uint64_t fingerprint64(const uint8_t *s, size_t length) {
    if (length >= 8) {
        if (length <= 16)
            return hash8to16(fetch64(s), fetch64(s + length - 8), length);
        if (length <= 32)
            return hash17to32(s, length);
        return length <= 64 ? hash33to64(s, length) : hash_over_64(s, length);
    }
    if (length >= 4)
        return hash16(length + (fetch32(s) << 3), fetch32(s + length - 4), K2 + length * 2);
    if (length > 0) {
        const uint64_t y = s[0] + (uint64_t{s[length >> 1]} << 8), z = length + (uint64_t{s[length - 1]} << 2);
        return shift_mix(y * K2 ^ z * K0) * K2;
    }
    return K2;
}

} // namespace farmhash
