"""Many small tensors as one: an operation on all of them gives what it gives on each."""

import torch

from threepass.numerics import packed


def test_together_is_each_alone(packs):
    nhwc = torch.randn(4, 5, 3, 3).to(memory_format=torch.channels_last)
    tensors = [torch.randn(3, 4), torch.randn(()), nhwc, torch.randn(2, 6).t(), torch.randn(7).double(), torch.randn(5)]
    results = packed.together(lambda z: z * 2 + 1, tensors)
    for z, result in zip(tensors, results, strict=True):
        assert torch.equal(result, z * 2 + 1)
        assert result.dtype == z.dtype
    assert results[2].stride() == nhwc.stride()
    assert packed.together(torch.neg, []) == []
    sparse = torch.eye(3).to_sparse()
    assert packed.together(torch.neg, [sparse])[0].is_sparse


def test_terms_of_other_layouts_go_together(packs):
    a = [torch.randn(4, 5, 3, 3).to(memory_format=torch.channels_last) for _ in range(6)]
    b = [torch.randn(4, 5, 3, 3).bfloat16() for _ in range(6)]
    for x, y, result in zip(a, b, packed.together(torch.add, a, b), strict=True):
        assert torch.equal(result, x + y)


def test_large_tensors_are_not_copied(packs, monkeypatch):
    monkeypatch.setattr(packed, "LARGE", 10)
    seen = []
    packed.together(lambda z: seen.append(z.numel()) or z, [torch.randn(n) for n in (3, 4, 5, 6, 7, 11, 12)])
    assert sorted(seen) == [11, 12, 25]


def test_packs_of_several_formats_are_wide():
    parts = [torch.randn(3).bfloat16(), torch.randn(2), torch.randn(4).bfloat16()]
    whole = torch.ops.threepass.pack(parts)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, torch.cat([z.float() for z in parts]), rtol=0, atol=0)
    torch.library.opcheck(torch.ops.threepass.pack.default, (parts,))
