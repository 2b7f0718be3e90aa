"""The reproduction of the paper: what it claims, what is run for it, what came out, and the page that says so.

paper.py              the paper's own numbers
plan.py               the studies, as lists of training runs
records.py            results/paper/STUDY.json: what every finished run left
runner.py             trains what is missing, and stops in time
net_measurements.py   what is measured on a trained net besides its history
rules.py              the rules by which records confirm or refute a claim
claims.py             the claims, each as a list of comparisons
figures.py            the figures of the page
page.py               docs/claims.md, from the records alone
"""
