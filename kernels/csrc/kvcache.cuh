// Where keys and values stand in a page, and where the positions are cut for decode. docs/kernels/attention.md draws it.
//
// A tile is a page of one kv head: 64 positions x 256 dimensions. Pieces of 16 bytes are ordered so that a warp's load
// is contiguous and each piece is what a tensor-core lane wants: keys [position / 8][piece of the block][block][position
// % 8], values [position / run][dimension][run positions], with blocks of 64 dimensions, and 16 (int8) or 8 (fp16)
// elements a piece.
#pragma once

constexpr int kPage = 64;
constexpr int kDim = 256;
constexpr int kBlock = 64; // dimensions that share an int8 scale
constexpr int kBlocks = kDim / kBlock;

// Element index in a key tile; kPiece elements a piece.
template <int kPiece> __device__ __forceinline__ int key_index(int position, int dim) {
    const int block = dim / kBlock, piece = dim % kBlock / kPiece;
    return (((position / 8 * (kBlock / kPiece) + piece) * kBlocks + block) * 8 + position % 8) * kPiece + dim % kPiece;
}

template <int kPiece> __device__ __forceinline__ int value_index(int position, int dim) {
    return (position / kPiece * kDim + dim) * kPiece + position % kPiece;
}

// Positions are cut into segments at fixed places, shorter ones near the start, where there would be too few blocks. So a
// token's segments depend on its position alone.
constexpr int kSecondTier = 8192, kThirdTier = 32768, kFourthTier = 65536; // segments of 128 below, then of 256, 512, 1,024
constexpr int kSecondSegment = kSecondTier / 128, kThirdSegment = kSecondSegment + (kThirdTier - kSecondTier) / 256,
              kFourthSegment = kThirdSegment + (kFourthTier - kThirdTier) / 512;
constexpr int kSegmentPages = 1024 / kPage; // of the longest

__device__ __forceinline__ int segment_of(int position) {
    return position < kSecondTier   ? position / 128
           : position < kThirdTier  ? kSecondSegment + (position - kSecondTier) / 256
           : position < kFourthTier ? kThirdSegment + (position - kThirdTier) / 512
                                    : kFourthSegment + (position - kFourthTier) / 1024;
}
__device__ __forceinline__ int segment_begin(int segment) {
    return segment < kSecondSegment   ? segment * 128
           : segment < kThirdSegment  ? kSecondTier + (segment - kSecondSegment) * 256
           : segment < kFourthSegment ? kThirdTier + (segment - kThirdSegment) * 512
                                      : kFourthTier + (segment - kFourthSegment) * 1024;
}
