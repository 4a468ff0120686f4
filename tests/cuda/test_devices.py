"""Several devices in a process: which one is current, contexts, peers, and offload on the second one."""

from __future__ import annotations

from tests.cuda import calls

TWO = "import os\nos.environ['EMULATED_DEVICES'] = '2'\nimport torch\n"


def test_a_device_is_used_only_when_it_is_asked_for() -> None:
    done = calls.process(
        TWO
        + """
x = torch.ones(3, device="cuda:1")
print(torch.cuda.device_count(), torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
print(torch.cuda.current_device(), (x + 1).device)
try:
    x + torch.ones(3, device="cuda:0")
except RuntimeError as error:
    print("same device" in str(error))
"""
    )
    assert done.stdout.splitlines() == ["2 False True", "0 cuda:1", "True"], done.stderr


def test_tensors_are_copied_between_devices_in_the_order_of_their_streams() -> None:
    done = calls.process(
        TWO
        + """
import emulated_cuda
for transposed in (False, True):
    x = torch.zeros(500, 4, device="cuda:0")
    torch.cuda._sleep(50_000_000)
    x += torch.arange(2000.0, device="cuda:0").view(500, 4)
    source = x.t() if transposed else x
    before = emulated_cuda.counts()
    y = source.to("cuda:1", non_blocking=True)
    assert not emulated_cuda.host_waits(before)
    z = y * 2
    print(z.device, torch.equal(z.cpu(), source.cpu() * 2))
"""
    )
    assert done.stdout.splitlines() == ["cuda:1 True"] * 2, done.stderr


def test_peer_access_is_enabled_once() -> None:
    done = calls.process(
        TWO
        + """
from tests.cuda.calls import call
print(call("cudaDeviceEnablePeerAccess", 1, 0), call("cudaDeviceEnablePeerAccess", 1, 0))
print(call("cudaDeviceEnablePeerAccess", 0, 0), call("cudaSetDevice", 2))
"""
    )
    assert done.stdout.split() == [
        "cudaSuccess",
        "cudaErrorPeerAccessAlreadyEnabled",
        "cudaErrorInvalidDevice",
        "cudaErrorInvalidDevice",
    ], done.stderr


def test_offload_on_the_second_device_makes_no_context_on_the_first() -> None:
    done = calls.process(
        TWO
        + """
import tempfile, ssdtrain
def gradient(directory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.GELU()] * 3).to("cuda:1")
    x = torch.randn(256, 64, device="cuda:1")
    runtime = directory and ssdtrain.attach(model, {"offload": {"directories": directory, "amount": "all", "min_bytes": 1}})
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    if runtime:
        assert runtime.statistics().offload.offloaded_bytes > 0
        runtime.close()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
with tempfile.TemporaryDirectory() as directory:
    print(torch.equal(gradient(None), gradient(directory)))
print(torch._C._cuda_hasPrimaryContext(0))
"""
    )
    assert done.stdout.splitlines()[-2:] == ["True", "False"], done.stdout + done.stderr
