"""Device meshes, logical-axis rules and sharding annotations."""
