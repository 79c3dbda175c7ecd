// Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Each number is a
// function of counter and key, so it can be computed where it is needed.

__device__ inline void philox(u32 (&counter)[4], u32 key0, u32 key1) {
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        u64 a = (u64)counter[0] * 0xD2511F53u, b = (u64)counter[2] * 0xCD9E8D57u;
        counter[0] = (u32)(b >> 32) ^ counter[1] ^ key0;
        counter[1] = (u32)b;
        counter[2] = (u32)(a >> 32) ^ counter[3] ^ key1;
        counter[3] = (u32)a;
    }
}
