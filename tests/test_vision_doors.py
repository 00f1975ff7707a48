"""Images through every door, and what is no image: an engine, HTTP, chats and programs."""

from __future__ import annotations

import base64
import io
import re
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import sgl
from sgl.errors import ContextTooLong, InvalidRequest, ProgramError
from sgl.lang.record.pictures import image_bytes
from sgl.runtime.engine import Engine
from sgl.runtime.media import fetch, read
from tests.live_server import LiveServer
from tests.patience import PATIENCE
from tests.tiny_vision import IMAGE, PLACE, VIDEO, Oracle, picture, place, tiny_vision

QWEN = "Qwen2_5_VLForConditionalGeneration"
GREEDY = {"temperature": 0.0, "max_new_tokens": 5}
PROMPT = [7, 8, 9, *place(), 10, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("sees"), QWEN)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, QWEN)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", max_total_tokens=2048, check_ledger=True, image_urls="any") as engine:
        yield engine
        assert engine.check_ledger() == []


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    server = LiveServer(engine)
    yield server
    server.close()


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def counts(engine: Engine) -> dict[str, int]:
    return dict(engine.get_server_info()["internal_states"][0])


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """Serves pictures, and what is none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/picture": png(picture(1)), "/page": b"<html>"}.get(self.path, b"")
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "/picture")
            elif self.path == "/loop":
                self.send_response(302)
                self.send_header("Location", "/loop")
            else:
                self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_an_image_is_a_path_a_url_base64_bytes_or_a_picture(
    engine: Engine, oracle: Oracle, web: str, tmp_path: Path
) -> None:
    data = png(picture(1))
    (tmp_path / "picture.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    before = counts(engine)["encoded_images"]
    expected = oracle.greedy(PROMPT, [picture(1)], 5)
    forms = [picture(1), data, text, f"data:image/png;base64,{text}", tmp_path / "picture.png"]
    for image in [*forms, str(tmp_path / "picture.png"), f"{web}/picture", f"{web}/away", [data], (data,)]:
        found = engine.generate(input_ids=PROMPT, image_data=image, sampling_params=GREEDY)
        assert found["output_ids"] == expected
    assert counts(engine)["encoded_images"] == before + 1
    result = engine.generate(prompt=f"{PLACE}What?", image_data=data, sampling_params=GREEDY)
    assert result["meta_info"]["prompt_tokens"] > 15


def test_a_second_question_about_an_image_runs_no_encoder_and_finds_its_pages(
    engine: Engine, oracle: Oracle
) -> None:
    image, other = picture(20, 64, 32), picture(21, 64, 32)
    first, second = [*place(), 20, 21, 22], [*place(), 30, 31]
    engine.generate(input_ids=first, image_data=image, sampling_params=GREEDY)
    before = counts(engine)
    found = engine.generate(input_ids=second, image_data=image, sampling_params=GREEDY)
    assert found["output_ids"] == oracle.greedy(second, [image], 5)
    page = engine.config.page_size or 0
    assert found["meta_info"]["cached_tokens"] == (1 + 32) // page * page
    assert counts(engine)["encoded_images"] == before["encoded_images"]
    found = engine.generate(input_ids=second, image_data=other, sampling_params=GREEDY)
    assert found["output_ids"] == oracle.greedy(second, [other], 5)
    assert found["meta_info"]["cached_tokens"] == 0
    assert counts(engine)["encoded_images"] == before["encoded_images"] + 1


def test_a_list_of_prompts_has_images_each(engine: Engine, oracle: Oracle) -> None:
    images = [[picture(1)], None, [picture(2), picture(3, 17, 60)]]
    prompts = [PROMPT, [5, 6, 7], [*place(), *place(), 9]]
    found = engine.generate(input_ids=prompts, image_data=images, sampling_params=GREEDY)
    expected = [oracle.greedy(ids, each or [], 5) for ids, each in zip(prompts, images, strict=True)]
    assert [each["output_ids"] for each in found] == expected
    both = engine.generate(input_ids=[PROMPT, PROMPT], image_data=picture(1), sampling_params=GREEDY)
    assert [each["output_ids"] for each in both] == [expected[0]] * 2


def bomb() -> bytes:
    """A PNG of a million pixels a side, by its header."""
    data = bytearray(png(Image.new("RGB", (1, 1))))
    data[16:24] = (10**6).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD = [
    (b"no image", "cannot be read"),
    ("no image either", "none of these"),
    ("data:image/png,abc", "base64"),
    (b"", "cannot be read"),
    (png(picture(1))[:60], "cannot be read"),
    (Image.open(io.BytesIO(png(picture(1))[:60])), "cannot be read"),
    (bomb(), "too large|pixels"),
    (png(Image.new("RGB", (4000, 2))), "200 times"),
    (7, "is a path"),
    ("ftp://example.com/x.png", "none of these"),
    ([picture(1)] * 2, "placeholders for 1"),
    ([], "placeholders for 1"),
    ([picture(1)] * 300, "256"),
    ("http://nowhere.invalid/x.png", "no image is fetched"),
    ("http://[bad", "no image is fetched"),
    ("http://localhost:99999/x", "no image is fetched"),
    ("QUJD" * 200, "cannot be read"),
    ("\0", "none of these"),
]


@pytest.mark.parametrize(("image", "said"), BAD)
def test_what_is_no_image_is_refused_and_disturbs_nobody(engine: Engine, image: Any, said: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(
            engine.generate, input_ids=[5, 6], sampling_params={"max_new_tokens": 20, "temperature": 0}
        )
        with pytest.raises(InvalidRequest, match=said):
            engine.generate(input_ids=PROMPT, image_data=image, sampling_params=GREEDY)
        assert other.result()["meta_info"]["completion_tokens"] > 0


def test_urls_are_bounded(engine: Engine, folder: Path, web: str) -> None:
    for path, said in (("page", "cannot be read"), ("gone", "404"), ("loop", "redirected")):
        with pytest.raises(InvalidRequest, match=said):
            engine.generate(input_ids=PROMPT, image_data=f"{web}/{path}", sampling_params=GREEDY)
    for policy, said in (("public", "not public"), ("none", "not fetched")):
        with (
            Engine(str(folder), device="cpu", max_total_tokens=256, image_urls=policy) as other,
            pytest.raises(InvalidRequest, match=said),
        ):
            other.generate(input_ids=PROMPT, image_data=f"{web}/picture", sampling_params=GREEDY)


def test_a_name_that_nobody_looks_up_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answered.wait(PATIENCE))
    try:
        with pytest.raises(InvalidRequest, match="it takes more than 10 s"):
            fetch.fetch("http://slow.invalid/x.png", "any", 1000, time.monotonic() + 0.01)
    finally:
        answered.set()


def test_the_urls_of_a_prompt_share_their_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []

    def fetched(url: str, policy: str, max_bytes: int, end: float) -> bytes:
        ends.append(end)
        return png(picture(len(ends)))

    monkeypatch.setattr(read, "fetch", fetched)
    reader = engine._builder.reader
    assert reader is not None
    reader.items([f"http://slow.invalid/{i}" for i in range(3)])
    assert len(ends) == 3
    assert len(set(ends)) == 1


def made_reader(engine: Engine) -> read.MediaReader:
    reader = engine._builder.reader
    assert reader is not None
    return read.MediaReader(reader.config, "any", 64)


def test_pictures_are_told_apart_by_what_is_seen(engine: Engine) -> None:
    """Pixels of a palette are numbers of its colours, and a file may say that its image lies on its side."""
    reader, seen = made_reader(engine), picture(1).resize((40, 24))
    upright = picture(2).resize((40, 24))
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    palettes = [seen.quantize(8), seen.quantize(8)]
    palettes[1].putpalette(bytes(255 - each for each in palettes[0].getpalette() or []))
    for given, expected in ((palettes[0], None), (palettes[1], None), (turned, upright)):
        plain = given.convert("RGB") if expected is None else expected
        digest = reader.item("image", plain).digest
        assert reader.item("image", given).digest == digest
        assert reader.item("image", image_bytes(given)).digest == digest
    assert len({reader.item("image", each).digest for each in palettes}) == 2


def test_videos_are_told_apart_by_where_their_frames_end(engine: Engine) -> None:
    """Decoders skip what follows an image; and bytes may be those that another picture has as pixels."""
    reader = made_reader(engine)
    one, two, three = (image_bytes(picture(seed).resize((32, 32))) for seed in (1, 2, 3))
    first = reader.item("video", [one, two + three])
    second = reader.item("video", [one + two, three])
    assert first.digest == reader.item("video", [one, two]).digest
    assert second.digest == reader.item("video", [one, three]).digest
    assert len({its.digest for its in (first, second)}) == 2
    seen = picture(1).resize((32, 32))
    reader.item("image", seen)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        reader.item("image", read._identity(seen, "image"))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "F", "I", "I;16"]
)
def test_pictures_of_any_mode_are_sent_by_programs(mode: str, engine: Engine) -> None:
    given = Image.new(mode, (40, 24), 1)
    reader = made_reader(engine)
    assert reader.item("image", image_bytes(given)).digest == reader.item("image", given).digest


def test_a_picture_that_is_as_it_is_seen_is_not_copied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = picture(1, 37, 29)

    def copy(self: Image.Image) -> Image.Image:
        raise AssertionError("its pixels are read, and nothing writes them")

    monkeypatch.setattr(Image.Image, "copy", copy)
    assert made_reader(engine).item("image", given).frames.any()


def test_a_picture_that_is_cut_off_is_named_by_programs() -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        image_bytes(Image.open(io.BytesIO(png(picture(1))[:60])))


def test_frames_are_bounded_before_work_is_done_for_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, left = made_reader(engine), list[int]()

    def fetched(url: str, policy: str, max_bytes: int, end: float) -> bytes:
        left.append(max_bytes)
        return bytes(1000)

    monkeypatch.setattr(read, "fetch", fetched)
    monkeypatch.setattr(read, "MAX_BYTES", 2500)
    with pytest.raises(InvalidRequest, match="500 are the most"):
        reader.item("video", ["http://slow.invalid/x.png"] * 4)
    assert left == [2500, 1500, 500]
    with pytest.raises(InvalidRequest, match="1 to 768 frames, not 769"):
        reader.item("video", ["http://slow.invalid/x.png"] * 769)
    assert len(left) == 3
    monkeypatch.setattr(read.np, "empty", None)  # no memory is taken
    with pytest.raises(ContextTooLong):
        reader.item("video", [Image.new("RGB", (64, 64))] * 200)
    seen, rgb = list[int](), read._rgb
    monkeypatch.setattr(read, "_rgb", lambda given, kind: seen.append(1) or rgb(given, kind))
    with pytest.raises(ContextTooLong):
        reader.item("video", [image_bytes(Image.new("RGB", (64, 64))), *[Image.new("L", (64, 64))] * 199])
    assert len(seen) == 1, "nor are others converted to be hashed"


def test_images_are_counted_against_the_context(folder: Path) -> None:
    with Engine(str(folder), device="cpu", max_total_tokens=256, context_length=30) as engine:
        engine.generate(input_ids=PROMPT, image_data=picture(1), sampling_params=GREEDY)
        with pytest.raises(ContextTooLong):
            engine.generate(input_ids=[*PROMPT, *range(5, 20)], image_data=picture(1), sampling_params=GREEDY)
        with pytest.raises(ContextTooLong):
            engine.generate(input_ids=[*place(), *place()], image_data=[picture(1)] * 2, sampling_params=GREEDY)


def test_a_model_for_texts_refuses_images() -> None:
    with Engine(device="cpu", max_total_tokens=256) as engine:
        with pytest.raises(InvalidRequest, match="takes no images"):
            engine.generate(prompt="x", image_data=png(picture(1)))
        assert not engine.get_server_info()["has_image_understanding"]


def chat_ids(oracle: Oracle, *turns: str) -> list[int]:
    text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    return list(oracle.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_chats_and_generate_take_images(server: LiveServer, oracle: Oracle, web: str) -> None:
    data = "data:image/png;base64," + base64.b64encode(png(picture(5))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": data, "detail": "high"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": f"{web}/picture"}},
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    body = {"messages": [*messages, {"role": "user", "content": content}], "max_tokens": 5, "temperature": 0}
    reply = server.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()
    ids = chat_ids(oracle, "user\nHi", "assistant\nYes", f"user\n{PLACE}and{PLACE}")
    expected = oracle.greedy(ids, [picture(5), picture(1)], 5)
    assert reply["choices"][0]["token_ids"] == expected
    assert reply["usage"]["prompt_tokens"] == len(ids) + 2 * 14

    text = oracle.tokenizer.decode(ids)
    images = [data.partition(",")[2], f"{web}/picture"]
    found = server.post("/generate", {"text": text, "image_data": images, "sampling_params": GREEDY}).json()
    expected = oracle.greedy([1, *ids], [picture(5), picture(1)], 5)  # a text begins
    assert found["output_ids"] == expected
    texts = {"text": [text, "Hi"], "image_data": [images, None], "sampling_params": GREEDY}
    assert server.post("/generate", texts).json()[0]["output_ids"] == expected
    assert server.get("/get_model_info").json()["has_image_understanding"]
    assert "image" in server.get("/v1/models").json()["data"][0]["input_modalities"]


def test_a_client_reads_no_files_of_the_server(server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(png(picture(1)))
    for path in (str(file), f"file://{file}"):
        body = {"input_ids": PROMPT, "image_data": path, "sampling_params": GREEDY}
        assert server.post("/generate", body).status_code == 400
        part = {"type": "image_url", "image_url": {"url": path}}
        chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat).status_code == 400


@sgl.function
def look(s: Any, image: Any) -> None:
    s += sgl.user(sgl.image(image) + "What?") + sgl.assistant(sgl.gen("answer", max_tokens=5, temperature=0))


def test_programs_send_images_to_a_server(server: LiveServer, oracle: Oracle, web: str) -> None:
    ids = chat_ids(oracle, f"user\n{PLACE}What?")
    expected = oracle.tokenizer.decode(oracle.greedy(ids, [picture(1)], 5), skip_special_tokens=True)
    backend = sgl.RuntimeEndpoint(server.url)
    for image in (picture(1), png(picture(1)), f"{web}/picture", base64.b64encode(png(picture(1))).decode()):
        assert look.run(image, backend=backend)["answer"] == expected
    with pytest.raises(ProgramError, match="cannot be read"):
        look.run(b"no image", backend=backend)["answer"]


def test_placeholders_without_images_are_missed_in_texts_and_tokens_in_ids(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="placeholders for 1"):
        engine.generate(prompt=f"{PLACE}What?", sampling_params=GREEDY)
    assert engine.generate(input_ids=[5, IMAGE, 6], sampling_params=GREEDY)["output_ids"]


@sgl.function
def watch(s: Any, film: Any) -> None:
    s += sgl.user(film + "What?") + sgl.assistant(sgl.gen("answer", regex="(yes|no), [a-z]{3}", temperature=0))


def test_videos_are_files_or_lists_of_frames(server: LiveServer, engine: Engine, tmp_path: Path) -> None:
    frames = [picture(i) for i in range(4)]
    given = sgl.video(frames, fps=2)
    assert given == sgl.video([png(frame) for frame in frames], fps=2)
    assert sgl.video([png(frame, "BMP") for frame in frames], fps=2).data == given.data
    answers = [watch.run(given, backend=backend)["answer"] for backend in (engine, sgl.RuntimeEndpoint(server.url))]
    assert answers[0] == answers[1]
    body = {"frames": [base64.b64encode(png(frame)).decode() for frame in frames], "fps": 2}
    ids = [*place(VIDEO), 9]
    over_http = server.post("/generate", {"input_ids": ids, "video_data": body, "sampling_params": GREEDY}).json()
    alone = engine.generate(input_ids=ids, video_data={"frames": frames, "fps": 2}, sampling_params=GREEDY)
    assert over_http["output_ids"] == alone["output_ids"]
    for wrong, said in (([], "1 to 768"), ([png(picture(1)), b"no image"], "cannot be read")):
        with pytest.raises(InvalidRequest, match=said):
            engine.generate(input_ids=ids, video_data=[wrong], sampling_params=GREEDY)
    with pytest.raises(InvalidRequest, match="different sizes"):
        engine.generate(input_ids=ids, video_data=[[picture(1), picture(1, 16, 16)]], sampling_params=GREEDY)
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(20):
            frame = av.VideoFrame.from_image(picture(i, 64, 48))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    film = sgl.video(tmp_path / "film.mp4", num_frames=4)
    assert film.fps == pytest.approx(2.0)
    assert re.fullmatch("(yes|no), [a-z]{3}", watch.run(film, backend=engine)["answer"])
    with pytest.raises(InvalidRequest, match="no video"):
        sgl.video(tmp_path / "none.mp4")


def test_other_protocols_take_images(server: LiveServer, oracle: Oracle) -> None:
    data = base64.b64encode(png(picture(6))).decode()
    ids = chat_ids(oracle, f"user\n{PLACE}What?")
    expected = oracle.tokenizer.decode(oracle.greedy(ids, [picture(6)], 5), skip_special_tokens=True)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    turn = {"role": "user", "content": content}
    reply = server.post("/v1/messages", {"messages": [turn], "max_tokens": 5, "temperature": 0}).json()
    assert reply["content"][0]["text"] == expected
    url = f"data:image/png;base64,{data}"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"}]
    asked = {
        "input": [{"role": "user", "content": parts}],
        "max_output_tokens": 5,
        "temperature": 0,
        "store": False,
    }
    reply = server.post("/v1/responses", asked).json()
    assert reply["output"][0]["content"][0]["text"] == expected
    options = {"options": {"num_predict": 5, "temperature": 0}, "stream": False}
    message = {"role": "user", "content": "What?", "images": [data]}
    assert server.post("/api/chat", {"messages": [message], **options}).json()["message"]["content"] == expected
    assert (
        server.post("/api/generate", {"prompt": "What?", "images": [data], **options}).json()["response"]
        == expected
    )
    assert "vision" in server.post("/api/show", {"model": ""}).json()["capabilities"]
    assert server.post("/v1/messages/count_tokens", {"messages": [turn]}).status_code == 400
