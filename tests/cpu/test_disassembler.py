"""What NVIDIA's disassembler prints is read, and what it cannot read is not made up."""

import pytest

from tilewright.compile import disassemble as disassembler
from tilewright.compile.command import _cells
from tilewright.compile.job import Compiled
from tilewright.compile.report import Row


def test_output_of_the_disassembler_is_read():
    text = """
 Function f:
  REG:40 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:1024 TEXTURE:0 SURFACE:0 SAMPLER:0
\t.headerflags\t@"EF_CUDA_SM100"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/              @!P0 STL.64 [R1+0x8], R2 ;           /* 0x0000000000027919 */
        /*0020*/              @UP1 UTCHMMA gdesc[UR20], UP0 ;      /* 0x0000000000027919 */
        /*0030*/               @P1 UTCQMMA gdesc[UR20], UP0 ;      /* 0x0000000000027919 */
        /*0040*/                   HMMA.16816.F32 R4, R4, R8, RZ ; /* 0x0000000000027919 */
        /*0050*/                   UTMALDG.2D [UR12], [UR32] ;     /* 0x0000000000027919 */
        /*0060*/                   FMNMX R4, R4, R8, !PT ;         /* 0x0000000000027919 */
"""
    mix = {"LDC": 1, "STL": 1, "UTCHMMA": 1, "UTCQMMA": 1, "HMMA": 1, "UTMALDG": 1, "FMNMX": 1}
    found = disassembler.parse(text)
    assert found == disassembler.Resources(40, 16, 0, 2048, mix)
    looped = (
        text
        + """
        /*0070*/                   LOP3.LUT R4, R4, 0xf, RZ, 0xc0, !PT ;
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R24], R5 ;
        /*0090*/              @!P0 BRA 0x80 ;
        /*00a0*/                   FFMA R4, R4, R8, R4 ;
        /*00b0*/               @P0 BRA 0x70 ;
        /*00c0*/                   BRA 0x80 ;
        /*00d0*/               @P0 BRA 0x60 ;
"""
    )
    assert disassembler.parse(looped).loop == 5, "not the wait inside of it, nor the loop around it"
    assert not found.spills, "a few registers are a cost, not a ban"
    assert disassembler.parse(text.replace("STACK:16", "STACK:72")).spills
    assert set(found.matrix) == {"UTCHMMA", "UTCQMMA", "HMMA"}
    with pytest.raises(ValueError, match="REG"):
        disassembler.parse("nothing")


def test_a_missing_disassembler_names_its_package(monkeypatch):
    monkeypatch.setattr(disassembler, "find_tool", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"cuobjdump must be installed \(pip install 'tilewright\[cuda\]'\)"):
        disassembler.disassemble(b"")


def test_code_that_the_disassembler_cannot_read_is_no_failed_binary(monkeypatch):
    """nvdisasm 13.5 stops at some NOPs of binaries that run."""

    def printed(command, *_):
        if "-sass" in command:
            raise RuntimeError("cuobjdump failed with 1: nvdisasm error   : Opclass 'nop_', undefined value")
        return "  REG:168 STACK:0 SHARED:1024 LOCAL:0"

    monkeypatch.setattr(disassembler, "_printed", printed)
    found = disassembler.disassemble(b"")
    assert (found.registers, found.shared_bytes, found.instructions) == (168, 1024, {})
    row = Row("matmul", "sm_90", "kernel", "config", "problem", 1, True, Compiled(found, 100, 0.1), threads=128, weights=8)
    assert row.verdict == "ok"
    assert _cells(row)[3:11] == ("168", "0", "1024", "?", "?", "?", "?", "?")
