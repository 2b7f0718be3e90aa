"""Makes the data of `05_forces.py`: ethanol along molecular dynamics, with energies and forces of GFN2-xTB by tblite.

    pip install tblite
    python examples/forces_data.py examples/data/ethanol.npz

Langevin dynamics at 500 K with steps of 0.5 fs; every 10th geometry is kept. Positions in Angstrom, energies in eV,
forces in eV/Angstrom. Takes about a minute.
"""

import sys

import numpy as np
from tblite.interface import Calculator

BOHR, HARTREE = 0.529177210903, 27.211386245988  # in Angstrom and eV
NUMBERS = np.array([6, 6, 8, 1, 1, 1, 1, 1, 1])
MASSES = np.array([{1: 1.008, 6: 12.011, 8: 15.999}[n] for n in NUMBERS])
START = np.array([
    [-0.89, -0.31, 0.04], [0.46, 0.36, -0.05], [1.43, -0.66, 0.10], [-1.01, -1.05, -0.75], [-1.67, 0.44, -0.04],
    [-0.97, -0.82, 0.99], [0.56, 0.86, -1.02], [0.57, 1.09, 0.76], [2.29, -0.23, 0.02],
])  # fmt: skip
TEMPERATURE, STEP, FRICTION, KEPT_EVERY = 500, 0.5, 0.01, 10  # K, fs, 1/fs
BOLTZMANN, ACCELERATION = 8.617333e-5, 9.64853e-3  # eV/K; (eV/Angstrom/u) in Angstrom/fs^2


def label(positions: np.ndarray) -> tuple[float, np.ndarray]:
    """Energy and forces of GFN2-xTB."""
    calculator = Calculator("GFN2-xTB", NUMBERS, positions / BOHR)
    calculator.set("verbosity", 0)
    result = calculator.singlepoint()
    return result.get("energy") * HARTREE, -result.get("gradient") * (HARTREE / BOHR)


def dynamics(count: int, seed: int = 0):
    """Geometries of Langevin dynamics (the BAOAB splitting), with their labels."""
    rng, masses = np.random.default_rng(seed), MASSES[:, None]
    noise = np.sqrt(BOLTZMANN * TEMPERATURE * ACCELERATION / masses)
    decay = np.exp(-FRICTION * STEP)
    x, v = START.copy(), noise * rng.standard_normal(START.shape)
    energy, forces = label(x)
    for i in range(-500, count * KEPT_EVERY):  # the first steps heat it up
        v += 0.5 * STEP * ACCELERATION * forces / masses
        x += 0.5 * STEP * v
        v = decay * v + np.sqrt(1 - decay**2) * noise * rng.standard_normal(x.shape)
        x += 0.5 * STEP * v
        energy, forces = label(x)
        v += 0.5 * STEP * ACCELERATION * forces / masses
        if i >= 0 and i % KEPT_EVERY == 0:
            yield x - x.mean(0), energy, forces


if __name__ == "__main__":
    path, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    positions, energies, forces = map(np.array, zip(*dynamics(count), strict=True))
    np.savez_compressed(
        path,
        numbers=NUMBERS,
        positions=positions.astype(np.float32),
        energies=energies,
        forces=forces.astype(np.float32),
    )
    print(
        f"{count} geometries, energies {energies.mean():.2f} +- {energies.std():.3f} eV, forces {forces.std():.2f} eV/A"
    )
