import exports as x


def test_the_sample_moves_eight_mebibytes_in_and_four_out(real):
    import nsan

    migrations = nsan.summary(real("um_easycuda_rtx4060l_2023.4.4_lazy"))["migrations"]
    assert (migrations["htod_bytes"], migrations["dtoh_bytes"]) == (8 * x.MIB, 4 * x.MIB)
