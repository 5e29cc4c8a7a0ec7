"""An OpenAI-compatible server that computes nothing, for tests: `python stub_server.py OPTIONS` prints its port.

Options beside those of the tests of `ttft`: "port"; "per_token", seconds of the encoder for an image token, which the
clock of the encoder tells; "answers", other token ids; "die", the number of the request that ends the process.

It decodes no image; it counts tokens from the size in the JPEG header, as the real one counts them from the pixels.
"""

import asyncio
import base64
import io
import json
import os
import sys
import time

from PIL import Image

from kimivl_lab import image_geometry

TEXT, AROUND = 20, 8
served: dict = {"requests": 0, "ttft_sum": 0.0, "queries": 0, "hits": 0, "seen": set(), "encoder": 0.0, "queue": 0.0}
options: dict = {}
encoder = asyncio.Lock()


async def answer(reader, writer):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            request, *headers = head.decode().split("\r\n")
            length = next((int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length")), 0)
            body = await reader.readexactly(length)
            path = request.split()[1]
            if options.get("key") and f"Authorization: Bearer {options['key']}" not in headers:
                reply(writer, 401, "no")
            elif path == "/v1/models":
                reply(writer, 200, json.dumps({"data": [{"id": name} for name in options.get("models", ["stub"])]}))
            elif path == "/metrics":
                reply(writer, 404 if options.get("no_metrics") else 200, metrics())
            elif path in ("/health", "/version"):
                reply(writer, 200, json.dumps({"version": "stub"}))
            elif path == "/collective_rpc":
                reply(writer, 200, json.dumps({"results": [{"all": {"encoder_forward_secs": served["encoder"]}}]}))
                served["encoder"] = 0.0
            elif path != "/v1/chat/completions":
                reply(writer, 404, "not found")
            else:
                await chat(writer, json.loads(body))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def reply(writer, status, text):
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


def metrics():
    return (
        "# HELP a comment\n"
        f'vllm:mm_cache_queries_total{{engine="0"}} {served["queries"]}.0\n'
        f'vllm:mm_cache_hits_total{{engine="0"}} {served["hits"]}.0\n'
        f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {served["ttft_sum"]}\n'
        f'vllm:time_to_first_token_seconds_count{{engine="0"}} {served["requests"]}.0\n'
        f'vllm:request_queue_time_seconds_sum{{engine="0"}} {served["queue"]}\n'
        f'vllm:request_prefill_time_seconds_sum{{engine="0"}} {served["ttft_sum"]}\n'
        f'vllm:request_decode_time_seconds_sum{{engine="0"}} 0.0\n'
        f'vllm:request_decode_time_seconds_count{{engine="0"}} {served["requests"]}.0\n'
    )


async def chat(writer, body):
    served["requests"] += 1
    number = served["requests"] - options.get("from", 8)  # two calibrating and some warming requests are answered well
    mode = options.get("mode", "") if number >= 0 and number % options.get("every", 1) == 0 else ""
    if mode == "status":
        return reply(writer, options["status"], json.dumps({"error": {"message": "no such size"}}))
    urls = [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    tokens = 0
    for url in urls:
        data = base64.b64decode(url.partition(",")[2])
        served["queries"] += 1
        served["hits"] += data in served["seen"] or bool(options.get("always_hits"))
        served["seen"].add(data)
        tokens += image_geometry(*Image.open(io.BytesIO(data)).size).tokens
    if number == options.get("die"):
        os._exit(3)
    delay, encoding = options.get("delay", 0.002), options.get("per_token", 0.0) * tokens
    came = time.perf_counter()
    async with encoder:  # one request at a time, as one encoder
        served["queue"] += time.perf_counter() - came
        await asyncio.sleep(delay + encoding)
    served["encoder"] += encoding
    served["ttft_sum"] += delay + encoding
    if not body.get("stream"):
        ids = [tokens, options.get("answers", 0)]
        choice = {"message": {"content": str(ids)}, "token_ids": ids}
        return reply(writer, 200, json.dumps({"choices": [choice]}))
    if mode == "hang":
        return await asyncio.sleep(3600)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    send(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for _ in range(3):
        send(writer, {"choices": [{"delta": {}}]})
    if mode == "bad":
        chunk(writer, b"data: {not json\n\n")
    if mode == "error":
        send(writer, {"error": {"message": "out of memory"}})
    if mode == "reset":
        await writer.drain()
        return writer.transport.abort()
    for word in [] if mode == "silent" else ["one", " two"][: body["max_tokens"]]:
        send(writer, {"choices": [{"delta": {"content": word}}]})
    if not options.get("no_usage"):
        prompt = TEXT + AROUND * len(urls) + tokens + (options.get("extra", 0) if number >= 0 else 0)
        send(writer, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 2}})
    chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def send(writer, event):
    chunk(writer, b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")


def chunk(writer, data):
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", options.get("port", 0), limit=2**26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    options.update(json.loads(sys.argv[1]))
    asyncio.run(main())
