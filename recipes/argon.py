"""A recipe to copy: relax argon structures with their cell, heat them to 60 K, hold them there, follow them.

mattermill run recipes/argon.py structures.extxyz --out argon.mill
mattermill status argon.mill
"""

import mattermill as mm

KELVIN = 60.0

model = mm.models.noble_gases()

relax = mm.Relax(fmax=0.005, cell="isotropic", max_steps=500)
# Only what is bound goes on.
bound = mm.Filter("energy_per_atom < 0", name="bound")
heat = mm.Heat(start=10.0, stop=KELVIN, steps=1_000, dt=2.0)
settle = mm.Equilibrate(mm.NVT(KELVIN), steps=1_000, dt=2.0)
# Both ends get every system: one at constant energy, one with a thermostat.
constant_energy = mm.Produce(mm.NVE(), steps=1_000, every=50, dt=2.0, name="produce-nve")
thermostat = mm.Produce(mm.NVT(KELVIN), steps=1_000, every=50, dt=2.0, name="produce-nvt")

recipe = mm.Recipe("argon", model=model, graph=relax >> bound >> heat >> settle >> [constant_energy, thermostat])


def structures():
    """Used when no structure files are named: one small crystal."""
    from ase.build import bulk

    crystal = bulk("Ar", "fcc", a=5.4, cubic=True) * (3, 3, 3)
    crystal.info["id"] = "argon-108"
    return [crystal]
