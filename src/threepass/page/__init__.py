"""Pages and figures, shared by `report`, `init-study`, `bench` and `reproduce`: one writer, one plotter.

render.py    jinja2 templates from the folder templates/
figure.py    a panel of lines as SVG; grid.py: a grid of coloured cells
images.py    small PNG images as data URIs
writer.py    tables, and a page with its figures beside it: one file that needs no network
"""
