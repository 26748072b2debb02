"""Parameters of the published sizes, counted in their files.

Of Qwen3.5 without the head that drafts.
"""

PUBLISHED = {
  "Qwen3-VL-2B": 2_127_532_032,
  "Qwen3-VL-4B": 4_437_815_808,
  "Qwen3-VL-8B": 8_767_123_696,
  "Qwen3-VL-32B": 33_357_390_064,
  "Qwen3-VL-30B-A3B": 31_070_754_032,
  "Qwen3-VL-235B-A22B": 235_670_022_896,
  "Qwen2.5-VL-3B": 3_754_622_976,
  "Qwen2.5-VL-7B": 8_292_166_656,
  "Qwen2.5-VL-32B": 33_452_718_336,
  "Qwen2.5-VL-72B": 73_410_777_344,
  "Qwen3.5-9B": 9_409_813_744,
  "Qwen3.5-27B": 27_356_728_560,
  "Qwen3.5-35B-A3B": 35_107_181_936,
  "Qwen2-VL-2B": 2_208_985_600,
  "Qwen2-VL-7B": 8_291_375_616,
  "Qwen2-VL-72B": 73_405_560_320,
  "OpenCUA-7B": 8_292_166_656,
  "OpenCUA-32B": 33_452_718_336,
  "GLM-4.1V-9B": 10_292_777_472,
  "GLM-4.5V": 107_710_933_120,
  "SmolVLM2-256M": 256_484_928,
  "SmolVLM2-500M": 507_482_304,
  "SmolVLM2-2.2B": 2_246_784_880,
  "Idefics3-8B": 8_462_086_384,
  "Gemma-3-4B": 4_300_079_472,
  "Gemma-3-12B": 12_187_325_040,
  "Gemma-3-27B": 27_432_406_640,
}
