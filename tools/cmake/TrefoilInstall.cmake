# Install rules: headers, libraries, CMake package, pkg-config files.
