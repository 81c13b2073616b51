"""`python -m molora_cli`, which launchers of several processes need."""

from molora_cli.app import main

if __name__ == "__main__":
    main()
