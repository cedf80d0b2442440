"""A crowd of hostile clients in one event loop, run as a program with a port of this machine and a number of clients.

It attacks the port until it is killed, and prints "here" when every client has begun. The clients are of six kinds;
each kind has an address of its own."""

import asyncio
import json
import os
import random
import sys
from contextlib import suppress

PAUSE = 0.5  # seconds between what one client does and what it does next
HOST = b"Host: localhost\r\n"
HEAD = b"POST /api/sample HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
WORK = json.dumps({"sampler": {"sampler": "crs", "nfe": 64}}).encode()


async def stays(reader, writer):
    """Sends nothing, until the server closes the connection."""
    await reader.read()


async def drips(reader, writer):
    """Sends a head that never ends, byte by byte."""
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"X: ")
    while True:
        await asyncio.sleep(random.uniform(0, 2 * PAUSE))
        writer.write(b"x")
        await writer.drain()


async def reads_nothing(reader, writer):
    """Asks for many pages on one connection, and reads none of them."""
    reader._transport.pause_reading()
    while True:
        writer.write((b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * 50)
        await writer.drain()
        await asyncio.sleep(random.uniform(0, 2 * PAUSE))


async def leaves(reader, writer):
    """Begins work, and leaves before it is done."""
    writer.write(HEAD + b"Accept: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(WORK) + WORK)
    await asyncio.sleep(random.uniform(0, 2 * PAUSE))


async def talks_nonsense(reader, writer):
    writer.write(b"\x16\x03\x01" * 100)
    await asyncio.sleep(random.uniform(0, 2 * PAUSE))


async def sends_too_much(reader, writer):
    writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 200_000)
    await asyncio.sleep(random.uniform(0, 2 * PAUSE))


KINDS = (stays, drips, reads_nothing, leaves, talks_nonsense, sends_too_much)


async def client(port, number, begun):
    kind = number % len(KINDS)
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.1.{kind + 1}", 0))
            begun.add(number)
            try:
                await KINDS[kind](reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(random.uniform(0, 2 * PAUSE))


async def attack(port, count):
    begun = set()
    clients = asyncio.gather(*(client(port, number, begun) for number in range(count)))
    while len(begun) < count:
        await asyncio.sleep(PAUSE / 10)
    print("here", flush=True)
    await clients


if __name__ == "__main__":
    os.nice(19)  # the crowd's own use of the processor is not the server's
    asyncio.run(attack(int(sys.argv[1]), int(sys.argv[2])))
