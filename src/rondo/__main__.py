from rondo.cli import main

main()
