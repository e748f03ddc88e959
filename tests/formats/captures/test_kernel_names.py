"""Names of kernels as engines give them: their class, and the part that people read."""

import pytest

from windtunnel.formats.captures.capture import CLASSES, call_name, kernel_class, short_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
            "gemm",
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(...)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "gemm"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>(...)", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(...)", "kv_cache"),
        ("void vllm::concat_and_cache_mla_kernel<...>", "kv_cache"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(...)", "rope"),
        ("std::enable_if<...> vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(...)", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(...)", "activation"),
        ("triton_poi_fused_mul_silu_1", "activation"),
        ("fused_moe_kernel", "experts"),
        ("void vllm::moe::topkGatingSoftmax<8, 128, 4, 16>(...)", "experts"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)", "communication"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void vllm::scaled_fp8_quant_kernel_strided<...>", "quantization"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::embedding", "embedding"),
        ("somebody_s_kernel", "other"),
    ],
)
def test_a_kernels_class_is_told_by_its_name(name: str, expected: str) -> None:
    assert CLASSES[kernel_class(name)] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::elementwise_kernel<128, 4, f(int)>(int, f)", "elementwise_kernel"),
        ("void (anonymous namespace)::rms_norm<float>(float*)", "rms_norm"),
        ("nvjet_tst_128x64", "nvjet_tst_128x64"),
        ("aten::mm", "mm"),
        ("[CUDA memcpy Host-to-Device]", "[CUDA memcpy Host-to-Device]"),
    ],
)
def test_short_names_leave_out_what_is_not_the_function(name: str, expected: str) -> None:
    assert short_name(name) == expected


def test_calls_lose_their_version() -> None:
    names = [call_name(name) for name in ("cudaLaunchKernel_v7000", "cudaMallocAsync_v11020", "cuLaunchKernelEx")]
    assert names == ["cudaLaunchKernel", "cudaMallocAsync", "cuLaunchKernelEx"]
