"""Several devices and hosts: meshes and rules, links, and transfers between hosts and devices."""
