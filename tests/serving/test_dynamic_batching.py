"""The gate of large images, and batches without their clients."""

import asyncio

from vit.serving.dynamic_batching import PixelGate


def test_images_wait_in_order_until_there_is_room_for_their_pixels():
    async def main() -> list[str]:
        gate, events = PixelGate(100), []

        async def use(name: str, pixels: int) -> None:
            await gate.enter(pixels)
            events.append(f"{name} in with {gate.held}")
            await asyncio.sleep(0)
            events.append(f"{name} out")
            gate.leave(pixels)

        await asyncio.gather(use("huge", 500), use("a", 60), use("b", 40), use("c", 1))
        assert gate.held == 0
        return events

    assert asyncio.run(main()) == [
        "huge in with 500",
        "huge out",
        "a in with 100",  # b has entered too
        "b in with 100",
        "a out",
        "b out",
        "c in with 1",
        "c out",
    ]
