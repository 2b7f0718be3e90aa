"""The table of operations in the docs is what the code says."""

from pathlib import Path

from threepass.inspect.operations import BEGIN, END, fill, markdown

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_has_the_table_of_the_code():
    """If not: python -m threepass.inspect.operations docs/operations.md"""
    between = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert between.strip() == markdown()


def test_filling_replaces_the_table_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    fill(page)
    assert page.read_text() == f"before\n{BEGIN}\n{markdown()}\n{END}\nafter\n"


def test_it_lists_what_people_look_for():
    for name in ("linear", "conv2d", "scaled_dot_product_attention", "layer_norm", "batch_norm", "gelu", "reshape"):
        assert f"`{name}`" in markdown()
